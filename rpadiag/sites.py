"""The vocabulary of sites: semantic points of a decoder, the same for every model family and stack.

A site is named ``embed``, ``layers.<N>.<point>``, ``final_norm``, ``logits`` or ``logprob``. Tensors at a
site are token-major, ``[T, width]`` (heads are flattened into the width), so that one prompt's
activations from two stacks can be laid over one another without knowing either stack.

Every point belongs to one region and lists the points that its operation reads; the latter is
what makes a divergence *local*: the operation fed the other stack's tensors at exactly those points.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from rpadiag.errors import UsageError, unknown_name

ALIGNABLE_REGIONS = ("rope", "swiglu", "rmsnorm")  # the three of the method, which every family has a part of
ALIGN_NAMES = (*ALIGNABLE_REGIONS, "qk_norm")  # all that can be aligned
ALL = "all"  # what the contract names and the model has
REGIONS = (
    *ALIGNABLE_REGIONS,
    "qk_norm",
    "attention",
    "matmul",
    "all_reduce",
    "geglu",
    "experts",
    "lm_head",
    "embed",
    "sampling",
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One named point of the network.

    reads: points its operation takes as input, in argument order; ``^x`` is point ``x`` of the layer
    below (``embed`` below layer 0) and ``?x`` one that only some layers have: the entries up to the next one without ``?``
    are then alternatives, and the first that exists is read.
    """

    name: str
    region: str
    reads: tuple[str, ...]
    text: str


LAYER_POINTS: tuple[Point, ...] = (
    Point(name="input_norm", region="rmsnorm", reads=("^resid_mlp",), text="normalised input of attention"),
    Point(name="q", region="matmul", reads=("input_norm",), text="query projection"),
    Point(name="k", region="matmul", reads=("input_norm",), text="key projection"),
    Point(name="v", region="matmul", reads=("input_norm",), text="value projection"),
    Point(name="q_norm", region="qk_norm", reads=("q",), text="per-head normalised query"),
    Point(name="k_norm", region="qk_norm", reads=("k",), text="per-head normalised key"),
    Point(name="q_rope", region="rope", reads=("?q_norm", "q"), text="query after RoPE"),
    Point(name="k_rope", region="rope", reads=("?k_norm", "k"), text="key after RoPE"),
    Point(
        name="attn", region="attention", reads=("q_rope", "k_rope", "v"), text="attention output, heads concatenated"
    ),
    Point(
        name="o_reduce",
        region="all_reduce",
        reads=(),
        text="all-reduce of the output projection: the ranks' partial products, whose sum is `o`",
    ),
    Point(name="o", region="matmul", reads=("attn",), text="output projection"),
    Point(name="attn_norm", region="rmsnorm", reads=("o",), text="normalised attention output, before the add"),
    Point(
        name="resid_attn",
        region="rmsnorm",
        reads=("^resid_mlp", "?attn_norm", "o"),
        text="residual stream after attention",
    ),
    Point(name="post_norm", region="rmsnorm", reads=("resid_attn",), text="normalised input of the MLP"),
    Point(name="gate", region="matmul", reads=("post_norm",), text="gate projection"),
    Point(name="up", region="matmul", reads=("post_norm",), text="up projection"),
    Point(name="act", region="swiglu", reads=("gate", "up"), text="SwiGLU product"),
    Point(name="geglu", region="geglu", reads=("gate", "up"), text="GeGLU product, which no region aligns"),
    Point(
        name="down_reduce",
        region="all_reduce",
        reads=(),
        text="all-reduce of the down projection: the ranks' partial products, whose sum is `down`",
    ),
    Point(name="down", region="matmul", reads=("?act", "geglu"), text="down projection"),
    Point(name="router", region="matmul", reads=("post_norm",), text="router logits, one per expert"),
    Point(
        name="expert_out", region="experts", reads=("post_norm", "router"), text="weighted sum of the chosen experts"
    ),
    Point(name="mlp_norm", region="rmsnorm", reads=("down",), text="normalised MLP output, before the add"),
    Point(
        name="resid_mlp",
        region="rmsnorm",
        reads=("resid_attn", "?mlp_norm", "?expert_out", "down"),
        text="residual stream after the MLP",
    ),
)
HEAD_POINTS: tuple[Point, ...] = (
    Point(name="embed", region="embed", reads=(), text="token embedding"),
    Point(name="final_norm", region="rmsnorm", reads=("^resid_mlp",), text="normalised input of the head"),
    Point(name="logits", region="lm_head", reads=("final_norm",), text="logits"),
    Point(name="logprob", region="sampling", reads=("logits",), text="log-probability of the next token"),
)
POINTS: dict[str, Point] = {p.name: p for p in (*LAYER_POINTS, *HEAD_POINTS)}
# They belong to the region of the norms that read them, but both stacks round the stored sum alike: counted in, they
# would halve what the norms make.
RESIDUAL_ADDS = ("resid_attn", "resid_mlp")


def telling_points(region: str) -> tuple[str, ...]:
    """The points whose local divergence speaks for a region, wherever it is pooled: all of them but the residual adds."""
    return tuple(p.name for p in POINTS.values() if p.region == region and p.name not in RESIDUAL_ADDS)


def layer_site(layer: int | str, point: str) -> str:
    """Address of a layer's point: ``layer_site(3, "q_rope") == "layers.3.q_rope"``."""
    return f"layers.{layer}.{point}"


@cache
def split_site(site: str) -> tuple[int | None, str]:
    """(layer, point) of a site; the layer is None outside the decoder layers. Unknown sites raise."""
    parts = site.split(".")
    if len(parts) == 1 and site in {p.name for p in HEAD_POINTS}:
        return None, site
    if len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit() and parts[2] in {p.name for p in LAYER_POINTS}:
        return int(parts[1]), parts[2]
    raise unknown_name("site", site, [p.name for p in HEAD_POINTS] + [f"layers.N.{p.name}" for p in LAYER_POINTS])


def region_of(site: str) -> str:
    """Region that a site belongs to."""
    return POINTS[split_site(site)[1]].region


# The all-reduce of a stack that cuts the model over ranks -> the point that it gives. Its own tensor is what it reads: the ranks'
# partial products side by side, [T, ranks * W]. The other stack has no such point, so it has no end-to-end divergence.
REDUCED = {"o_reduce": "o", "down_reduce": "down"}
MOST_LAYERS = 1000  # of any model: a pattern that selects no site of so many selects none
# Points that a plain pre-norm SwiGLU decoder on one device does not have.
EXTRA_POINTS = (*REDUCED, "attn_norm", "geglu", "router", "expert_out", "mlp_norm")


def all_sites(num_layers: int, *, qk_norm: bool) -> list[str]:
    """Every site of a pre-norm SwiGLU decoder in execution order; ``qk_norm`` says whether it has per-head norms."""
    points = [p.name for p in LAYER_POINTS if p.name not in EXTRA_POINTS and (qk_norm or p.region != "qk_norm")]
    return sites_of([points] * num_layers)


def sites_of(layers: Sequence[Collection[str]]) -> list[str]:
    """Every site of a decoder in execution order, from the points that each of its layers has."""
    body = [layer_site(n, p.name) for n, points in enumerate(layers) for p in LAYER_POINTS if p.name in points]
    return ["embed", *body, "final_norm", "logits", "logprob"]


def with_reductions(sites: Iterable[str]) -> list[str]:
    """``sites`` with the all-reduce that gives a site before it."""
    giving = {given: point for point, given in REDUCED.items()}
    out: list[str] = []
    for site in sites:
        layer, point = split_site(site)
        if layer is not None and point in giving:
            out.append(layer_site(layer, giving[point]))
        out.append(site)
    return out


def reduced_site(site: str) -> str | None:
    """The site that an all-reduce gives; None for what is no all-reduce."""
    layer, point = split_site(site)
    return layer_site(layer, REDUCED[point]) if layer is not None and point in REDUCED else None


def in_execution_order(sites: Iterable[str]) -> list[str]:
    """Known sites sorted as a forward reaches them."""
    given = set(sites)
    layers: dict[int, set[str]] = {}
    for site in given:
        layer, point = split_site(site)
        if layer is not None:
            layers.setdefault(layer, set()).add(point)
    ordered = sites_of([layers.get(n, ()) for n in range(1 + max(layers, default=-1))])
    return [site for site in ordered if site in given]


def inputs_of(site: str, available: Iterable[str], *, num_layers: int) -> tuple[str, ...]:
    """Sites that the operation behind ``site`` reads, resolved against the sites a model has."""
    have = set(available)
    layer, point = split_site(site)

    def resolve(name: str) -> str:
        if name.startswith("^"):
            below = (num_layers if layer is None else layer) - 1
            return "embed" if below < 0 else layer_site(below, name[1:])
        return name if layer is None else layer_site(layer, name)

    found: list[str] = []
    decided = False
    for name in POINTS[point].reads:
        candidate = resolve(name.removeprefix("?"))
        if not decided and (not name.startswith("?") or candidate in have):
            found.append(candidate)
            decided = True
        if not name.startswith("?"):
            decided = False  # the last alternative
    return tuple(found)


def match_sites(patterns: Sequence[str], available: Sequence[str]) -> list[str]:
    """Sites that any glob pattern selects, in execution order.

    A pattern is matched against the whole address or the point alone (``q_rope`` means every
    layer's). ``[`` is literal: addresses have no character classes. A pattern that selects nothing is
    an error, never an empty result.
    """
    if not patterns:
        return list(available)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = _selected(pattern, available)
        if not hits:
            raise _selects_nothing(pattern, list(dict.fromkeys(s.rsplit(".", 1)[-1] for s in available)))
        chosen |= hits
    return [s for s in available if s in chosen]


def check_patterns(patterns: Iterable[str]) -> None:
    """UsageError for a glob that selects no site of any model; needs none, so it is asked before anything is loaded."""
    for pattern in patterns:
        if not _selected(pattern, list(POINTS)) and not _selected(pattern, sites_of([list(POINTS)] * MOST_LAYERS)):
            raise _selects_nothing(pattern, list(POINTS))


def _selected(pattern: str, available: Sequence[str]) -> set[str]:
    """The sites of ``available`` that one pattern selects, by address or by point."""
    escaped = pattern.replace("[", "[[]")
    return {
        s for s in available if fnmatch.fnmatchcase(s, escaped) or fnmatch.fnmatchcase(s.rsplit(".", 1)[-1], escaped)
    }


def _selects_nothing(pattern: str, points: Sequence[str]) -> UsageError:
    """The error for a pattern that selects none of these points; its hint is the nearest site, where one is near."""
    *before, last = pattern.split(".")
    close = difflib.get_close_matches(last, points, n=1)
    hint = "patterns are globs over addresses such as layers.0.q_rope, layers.*.attn or *_norm"
    if close:
        layers = [part for part in before if part.isdigit() or part == "*"]
        in_a_layer = layers and close[0] in {p.name for p in LAYER_POINTS}
        meant = layer_site(layers[0], close[0]) if in_a_layer else close[0]
        hint = hint if meant == pattern else f"did you mean {meant}?"
    return UsageError(
        f"site pattern {pattern!r} matches nothing",
        detail=f"known sites: {', '.join(points)} (per layer as layers.N.<site>)",
        hint=hint,
    )


def check_aligned(names: Iterable[str]) -> tuple[str, ...]:
    """Validate the names given to ``--align``: some of ALIGN_NAMES, or ``all`` alone."""
    names = tuple(names)
    if "" in names:
        raise UsageError("a region without a name", hint=f"some of {', '.join(ALIGN_NAMES)}, or {ALL}")
    if ALL in names and len(names) > 1:
        raise UsageError(
            f"`{ALL}` stands alone, and {', '.join(n for n in names if n != ALL)} was given beside it",
            hint="leave one of them out",
        )
    return names if names == (ALL,) else check_regions(names, known=ALIGN_NAMES)


def check_regions(names: Iterable[str], *, known: Sequence[str] = ALIGNABLE_REGIONS) -> tuple[str, ...]:
    """Validate region names, dropping repeats and keeping the order given."""
    out: list[str] = []
    for name in names:
        if name not in known:
            raise unknown_name("region", name, known)
        if name not in out:
            out.append(name)
    return tuple(out)
