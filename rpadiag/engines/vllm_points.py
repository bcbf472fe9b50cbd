"""What a vLLM worker shows: in the mode it runs in, and of the model it holds a shard of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rpadiag.sites import REDUCED, split_site

if TYPE_CHECKING:
    from rpadiag.engines.base import ModelFacts
    from rpadiag.engines.families import Family

# Points outside the compiled model, or at the attention operator, which stays whole in the compiled graph.
COMPILED_POINTS = ("q_rope", "k_rope", "v", "attn", "final_norm", "logits", "logprob")


def is_compiled(runner: Any) -> bool:
    """Whether the model runs as a compiled graph, whose modules are not called."""
    mode = getattr(runner.vllm_config.compilation_config, "mode", None)
    return mode is not None and getattr(mode, "name", str(mode)) != "NONE"


def describe(runner: Any) -> dict[str, Any]:
    """``model_runner`` and ``model_class`` by name, and ``compiled``: whether the model's modules are not called."""
    return {
        "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "model_class": type(runner.get_model()).__name__,
        "compiled": is_compiled(runner),
    }


def observable(sites: Sequence[str], *, compiled: bool) -> list[str]:
    """Those of ``sites`` that can be captured from a compiled model, or from one that is not."""
    return [s for s in sites if not compiled or split_site(s)[1] in COMPILED_POINTS]


def shard_widths(family: Family, facts: ModelFacts, num_ranks: int) -> dict[str, int]:
    """Width of every point on one of ``num_ranks`` ranks, where it is cut: by heads, or by intermediate columns.

    Where there are fewer key heads than ranks, each rank holds one.
    """
    widths = family.widths(facts)
    query = facts.num_heads // num_ranks * facts.head_dim
    key = max(1, facts.num_kv_heads // num_ranks) * facts.head_dim
    cut = dict.fromkeys(("q", "q_norm", "q_rope", "attn"), query) | dict.fromkeys(("k", "k_norm", "k_rope", "v"), key)
    cut |= dict.fromkeys(("gate", "up", "act"), facts.intermediate_size // num_ranks)
    return {point: cut.get(point, width) for point, width in widths.items()}


def full_widths(family: Family, facts: ModelFacts, num_ranks: int) -> dict[str, int]:
    """Width of every point once the shards of ``num_ranks`` ranks lie side by side, all-reduces included."""
    widths = family.widths(facts)
    reduced = {point: num_ranks * widths[given] for point, given in REDUCED.items() if given in widths}
    return widths | (reduced if num_ranks > 1 else {})
