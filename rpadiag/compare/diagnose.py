"""What is wrong at a site, from the two tensors alone and whatever was fed to them.

``diagnose_sites`` walks sites in execution order and names the first that differs, its region, the kind of fault and the
numbers solved from the data. Explanations are tried from the strongest proof to the weakest: identities that hold bit for bit,
parameters that reproduce a side once solved, structure, and only then statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rpadiag.compare import (
    diagnose_attention,
    diagnose_data,
    diagnose_embed,
    diagnose_head,
    diagnose_identity,
    diagnose_matmul,
    diagnose_noise,
    diagnose_norm,
    diagnose_rope,
    diagnose_router,
    diagnose_structure,
    diagnose_subset,
    diagnose_swiglu,
)
from rpadiag.compare.explain import FINDING_SEVERITY, SITE_SEVERITIES, Context, ContractReader, Explanation, Pair
from rpadiag.compare.roles import DIAGNOSED_REGIONS, REGION_WORDS, Role, find_role
from rpadiag.errors import UsageError, unknown_name
from rpadiag.findings import Finding
from rpadiag.structure import same_values

Explain = Callable[[Pair, Context], Iterator[Explanation]]

_BY_ROLE: dict[tuple[str, str], tuple[Explain, ...]] = {
    ("rope", "inv_freq"): (diagnose_rope.inv_freq,),
    ("rope", "table"): (diagnose_rope.table,),
    ("qk_norm", "rotated"): (diagnose_norm.norm_and_rope,),
    ("lm_head", "logits"): (diagnose_head.logits,),
    ("sampling", "logprob"): (diagnose_head.logprob,),
    ("attention", "cache"): (diagnose_attention.cache,),
    ("rmsnorm", "residual"): (diagnose_norm.residual,),
    ("rmsnorm", "rstd"): (),
    ("router", "experts"): (diagnose_router.experts,),
    ("router", "combine"): (diagnose_router.combine,),
    ("weights", "weights"): (diagnose_data.weights,),
}
_BY_REGION: dict[str, tuple[Explain, ...]] = {
    "rope": (diagnose_rope.output,),
    "rmsnorm": (diagnose_norm.norm_output,),
    "qk_norm": (diagnose_norm.norm_output,),
    "swiglu": (diagnose_swiglu.activation,),
    "attention": (diagnose_attention.attention,),
    "matmul": (diagnose_matmul.product,),
    "embed": (diagnose_embed.embedding,),
}
_STRUCTURE = (
    diagnose_structure.boundary,
    diagnose_subset.row_subset,
    diagnose_structure.saturated,
    diagnose_structure.offset,
    diagnose_structure.gains,
    diagnose_structure.coarser_grid,
    diagnose_subset.column_subset,
    diagnose_subset.low_rank,
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """severity: a key of SITE_SEVERITIES; ``control`` when nothing differs. findings: in order of execution, the cause first."""

    severity: str
    text: str
    region: str | None
    first_site: str | None
    equal_sites: tuple[str, ...]
    findings: tuple[Finding, ...]


def explain_site(pair: Pair, ctx: Context) -> list[Explanation]:
    """Every explanation of a difference at one site, strongest first; empty when the sides are equal."""
    if same_values(pair.a, pair.b):
        return []
    if pair.role.region == "weights" and not pair.a.is_floating_point():
        pair = replace(pair, a=pair.a.double(), b=pair.b.double())
    if not pair.a.is_floating_point() or _whole_positions(pair):
        found = list(diagnose_data.integers(pair))
        if pair.role.kind == "experts":
            found += diagnose_router.experts(pair, ctx)
        return found
    fatal = list(diagnose_structure.non_finite(pair))
    if fatal:
        return fatal
    if pair.role.region == "weights":
        return list(diagnose_data.weights(pair, ctx))
    found = []
    for identity in (*diagnose_identity.IDENTITIES, diagnose_subset.dropout):
        found += identity(pair)
        if found:
            break
    own = _BY_ROLE.get((pair.role.region, pair.role.kind), _BY_REGION.get(pair.role.region, ()))
    if pair.role.kind != "cache" and not found:
        found += diagnose_identity.equals_an_input(pair, ctx)
    rounded = bool(found) and found[0].code == "rounded-identity"
    if not found or (rounded and pair.role.kind in ("logits", "output")):
        for explain in own:
            found += explain(pair, ctx)
    if not any(e.complete for e in found):
        found += _structure(pair)
    return found


def _whole_positions(pair: Pair) -> bool:
    """Positions held as floats are still positions."""
    return pair.role.kind == "positions" and all(bool((t == t.round()).all()) for t in (pair.a, pair.b))


def _structure(pair: Pair) -> list[Explanation]:
    """The first structural explanation, then statistics."""
    found: list[Explanation] = []
    for look in _STRUCTURE:
        found += look(pair)
        if any(e.complete for e in found):
            return found
    if any(e.code == "coarser-grid" and e.severity == "rounding-contract" for e in found) and pair.change.rel_l2 < 0.03:
        return found
    return found + list(diagnose_noise.fallback(pair))


def diagnose_site(
    a: Tensor,
    b: Tensor,
    *,
    site: str,
    region: str | None = None,
    context: Mapping[str, Any] | None = None,
    contracts: ContractReader | None = None,
) -> list[Finding]:
    """Findings about one site: A is the reference, B the other side. Equal tensors give none.

    region: one of DIAGNOSED_REGIONS where the name of the site does not say it. context: what both sides were fed, by name
    (``x``, ``residual``, ``weight``, ``eps``, ``q``, ``positions``, ``gate``, ``up``, ...). contracts: the fingerprint.
    """
    return list(
        diagnose_sites(
            {site: a}, {site: b}, context or {}, regions={site: region} if region else None, contracts=contracts
        ).findings
    )


def diagnose_sites(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    inputs: Mapping[str, Any] | None = None,
    *,
    regions: Mapping[str, str] | None = None,
    contracts: ContractReader | None = None,
) -> Diagnosis:
    """Compare sites in the order of ``a``; both sides must have the same ones."""
    if list(a) != list(b):
        missing = [s for s in a if s not in b] or [s for s in b if s not in a]
        if missing:
            raise UsageError(f"site {missing[0]} was captured on one side only", hint="diagnose sites that both have")
    a, b = _comparable(a, b)
    ctx = Context(
        a=a,
        b=b,
        inputs={k: _plain(v) if isinstance(v, Tensor) else v for k, v in (inputs or {}).items()},
        contracts=contracts,
    )
    sites: list[tuple[str, Role, list[Explanation]]] = []
    equal = []
    for site in a:
        role = _role(site, regions, ctx)
        if a[site].shape != b[site].shape:
            sites.append((site, role, [diagnose_data.mismatched_shapes(site, role, a[site], b[site])]))
            break  # what follows cannot be laid over one another
        found = explain_site(Pair(site=site, role=role, a=a[site], b=b[site]), ctx)
        if found:
            sites.append((site, role, found))
        elif same_values(a[site], b[site]):
            equal.append(site)
    return _conclude(sites, tuple(equal))


def _role(site: str, regions: Mapping[str, str] | None, ctx: Context) -> Role:
    given = (regions or {}).get(site)
    if given is not None and given not in DIAGNOSED_REGIONS:
        raise unknown_name("region", given, DIAGNOSED_REGIONS)
    named = find_role(site, inputs=ctx.inputs, sites=list(ctx.a))
    return named if given is None or named.region == given else Role(region=given)


def _comparable(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both sides on the CPU, with at least one axis, as floats of 16 to 64 bits or as int64; complex as pairs."""
    one, two = ({s: _plain(t) for s, t in side.items()} for side in (a, b))
    for site in one:
        if one[site].is_floating_point() != two[site].is_floating_point():
            one[site], two[site] = one[site].double(), two[site].double()
    return one, two


def _plain(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    if x.is_complex():
        x = torch.view_as_real(x).flatten(-2)
    if not x.is_floating_point():
        x = x.to(torch.int64)
    elif x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = x.float()
    return x.reshape(1) if x.ndim == 0 else x


def _conclude(sites: Sequence[tuple[str, Role, list[Explanation]]], equal: tuple[str, ...]) -> Diagnosis:
    """The first divergent site is the diagnosis; later sites add what was made there, and non-finite values win."""
    if not sites:
        text = f"no finding: {len(equal)} sites are equal bit for bit"
        return Diagnosis(severity="control", text=text, region=None, first_site=None, equal_sites=equal, findings=())
    first_site, role, found = sites[0]
    severity = found[0].severity
    region = found[0].region or role.region
    findings = [_finding(site, r, e, rank=i) for i, (site, r, e) in enumerate(sites) if i == 0 or _made_here(e)]
    for _, r, explanations in sites[1:]:
        worse = next((e for e in explanations if e.severity == "fatal"), None)
        if worse is not None and severity not in ("data", "fatal"):
            region = region if severity in ("semantic", "biased-rounding") else worse.region or r.region
            severity = "fatal"
    inherited = [site for i, (site, _, e) in enumerate(sites) if i and not _made_here(e)]
    text = findings[0].text
    later = [f.text for f in findings[1:]]
    if later and severity != "data":
        text += "; then " + "; then ".join(later)
    if inherited:
        text += f"; downstream: {', '.join(inherited)} differ as a consequence"
    if equal:
        text += f"; bit-equal: {', '.join(equal)}"
    return Diagnosis(
        severity=severity, text=text, region=region, first_site=first_site, equal_sites=equal, findings=tuple(findings)
    )  # fmt: skip


def _made_here(found: Sequence[Explanation]) -> bool:
    """Whether something at a later site is known not to be inherited."""
    return found[0].severity == "fatal" or any(
        e.complete and e.code not in ("constant-gain", "row-gain", "column-gain") for e in found
    )


def _finding(site: str, role: Role, found: Sequence[Explanation], *, rank: int) -> Finding:
    """One finding per site: its explanations in one sentence."""
    main = found[0]
    region = main.region or role.region
    numbers = {k: v for e in reversed(found) for k, v in e.numbers.items()}
    assert main.severity in SITE_SEVERITIES
    return Finding(
        code=main.code,
        severity=FINDING_SEVERITY[main.severity],
        text=f"{REGION_WORDS.get(region, region)} ({site}): " + "; ".join(e.text for e in found),
        region=region,
        site=site,
        numbers={"site_severity": main.severity, "proof": main.proof, **numbers},
        rank=rank,
    )
