"""Looking at a checkpoint before anything is loaded from it: present, whole, safetensors, supported.

No tensor is read here; a 16-byte look at each shard's header tells a truncated file from a whole one.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rpadiag.engines.bundle_files import read_header
from rpadiag.engines.families import family_for
from rpadiag.errors import InputError, RpadiagError, unknown_name

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIG = "config.json"
SOURCES = "give a directory with config.json and safetensors files, or a hub id that can be reached from here"
DOWNLOAD_AGAIN = "download the checkpoint again"
HUB_TIMEOUT_S = 5.0


def resolve_dtype(name: str, config: Any) -> torch.dtype:
    """torch dtype of ``bfloat16``, ``float16``, ``float32`` or ``auto`` (what the checkpoint says)."""
    if name == "auto":
        stored = getattr(config, "dtype", None) or torch.float32
        name = stored if isinstance(stored, str) else str(stored).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown_name("dtype", name, (*DTYPES, "auto"))
    return DTYPES[name]


def is_path(model: str) -> bool:
    """Whether a model argument is a directory; any other name is a hub id."""
    return Path(model).exists() or os.path.isabs(model) or model.startswith((".", "~"))


def check_source(model: str, *, revision: str | None = None) -> None:
    """Raise InputError within seconds unless ``model`` is a whole directory, or a hub id that is cached or can be reached.

    A hub id is asked for once, with a timeout: loading would try again for half a minute.
    """
    if is_path(model):
        check_directory(Path(model))
        return
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    # what the hub's own errors derive from is what its HTTP client raises, whichever client that is
    transport = [b for b in errors.HfHubHTTPError.__mro__ if b.__module__.startswith(("http", "requests"))]
    expected: tuple[type[Exception], ...] = (OSError, ValueError, *(b for b in transport if issubclass(b, Exception)))
    try:
        get_hf_file_metadata(hf_hub_url(model, CONFIG, revision=revision), timeout=HUB_TIMEOUT_S)
    except expected as error:
        if not isinstance(error, ValueError) and isinstance(
            try_to_load_from_cache(model, CONFIG, revision=revision), str
        ):
            return
        raise _unresolved(model, revision, error) from error


def _unresolved(model: str, revision: str | None, error: Exception) -> InputError:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    where = f" at revision {revision}" if revision else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    if isinstance(error, HfHubHTTPError | HFValidationError):
        detail = f"it is no directory, and as a hub id: {said}"
    else:
        detail = f"it is no directory; as a hub id it is not in the cache, and the hub cannot be reached ({said})"
    return InputError(
        f"there is no model {model}{where}",
        detail=detail,
        hint=SOURCES,
    )


def check_directory(directory: Path) -> None:
    """Raise InputError unless ``directory`` holds the configuration of a known family and whole safetensors shards."""
    if not directory.is_dir():
        raise InputError(
            f"no model at {directory}",
            detail="it is not a directory",
            hint="give a directory with config.json and safetensors files",
        )
    if not (directory / CONFIG).is_file():
        raise InputError(f"{directory} has no config.json", hint="give the directory that holds config.json")
    family_for(_stored_config(directory / CONFIG).get("architectures"))
    for shard in _shards(directory):
        check_shard(shard)


def _stored_config(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not valid JSON", detail=str(error), hint=DOWNLOAD_AGAIN) from error
    if not isinstance(stored, dict):
        raise InputError(f"{path} is not a configuration", detail="it holds no JSON object", hint=DOWNLOAD_AGAIN)
    return stored


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise InputError(f"{index} is not a safetensors index", detail=str(error), hint=DOWNLOAD_AGAIN) from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise InputError(
                f"half a model: {directory / missing[0]} is missing",
                detail=f"{index.name} lists {len(names)} files, {len(missing)} of them are not there",
                hint=DOWNLOAD_AGAIN,
            )
        return [directory / name for name in names]
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise InputError(
            f"{directory} has only pickled weights ({pickles[0]})",
            detail="unpickling can run any code, so rpadiag reads safetensors only",
            hint="convert it with save_pretrained in an environment that you trust it in",
        )
    raise InputError(f"{directory} has no model.safetensors", hint="give a directory with config.json and safetensors")


def check_shard(path: Path) -> None:
    """Raise InputError unless a safetensors file's size is the one its header promises."""
    size = path.stat().st_size
    try:
        header, start = read_header(path)
        promised = start + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InputError(
            f"half a model: {path} is not a whole safetensors file",
            detail=f"{error}; the file has {size} bytes",
            hint=DOWNLOAD_AGAIN,
        ) from error
    if promised != size:
        raise InputError(
            f"half a model: {path} is truncated" if size < promised else f"{path} is longer than its header says",
            detail=f"its header promises {promised} bytes, the file has {size}",
            hint=DOWNLOAD_AGAIN,
        )


def load_config(model: str, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The transformers configuration of a directory or hub id."""
    from huggingface_hub import errors as hub_errors
    from transformers import AutoConfig

    # Newer hub libraries validate a configuration's fields; what older ones let through fails as arithmetic or a type.
    invalid = getattr(hub_errors, "StrictDataclassError", ValueError)
    try:
        return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, invalid) as error:
        raise _load_error(model, error) from error


def load_tokenizer(model: str, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer of a directory or hub id; one that is not there or cannot be loaded is an InputError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{model} has no tokenizer that can be loaded",
            detail=str(error).strip().splitlines()[0],
            hint="give prompts as token_ids in a .jsonl file",
        ) from error


def load_model(
    model: str, config: Any, *, dtype: torch.dtype, attention: str, revision: str | None, trust_remote_code: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    """(model, names in the checkpoint that the model has no place for). Missing tensors are an InputError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # What the loading report would say becomes an error below, or goes to the manifest.
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            revision=revision,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise _load_error(model, error) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    problems = sorted(str(name) for name in info["missing_keys"])
    problems += sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if problems:
        raise InputError(
            f"half a model: {model} lacks {problems[0]} in the shape its configuration gives",
            detail=f"{len(problems)} tensors are missing or of another shape",
            hint="check that config.json belongs to these weights",
        )
    loaded.eval()
    unused = tuple(sorted(str(name) for name in info["unexpected_keys"]))
    lost = [name for name in unused if name.endswith((".weight", ".bias"))]
    if lost:
        raise InputError(
            f"{model} holds {lost[0]}, which its configuration has no place for",
            detail=f"{len(lost)} weights would be left out",
            hint="check that config.json belongs to these weights",
        )
    return loaded, unused


def check_finite(model: nn.Module) -> None:
    """Raise InputError naming the first parameter that holds a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        # min and max carry NaN along and need no mask of the tensor's size
        low, high = torch.aminmax(parameter.detach())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad = ~torch.isfinite(parameter.detach())
            raise InputError(
                f"weight {name} has {int(bad.sum())} values that are not finite",
                detail=f"of {bad.numel()}; every score would be NaN",
                hint="the checkpoint is broken, or its values overflow the dtype: try --dtype float32",
            )


def _load_error(model: str, error: Exception) -> RpadiagError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hint = SOURCES
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        hint = "read the code that ships with the checkpoint, then run it with --trust-remote-code"
    elif isinstance(error, ImportError) or "attention" in str(error).lower():
        hint = "install what it names, or choose another --attention"
    return InputError(f"cannot load {model}", detail=" ".join(lines[:2]) if lines else type(error).__name__, hint=hint)
