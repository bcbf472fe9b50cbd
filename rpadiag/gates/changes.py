"""What else is different between a baseline and a run: packages, setup, contracts, and where divergence is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpadiag.findings import Finding
from rpadiag.gates.measures import local_shares
from rpadiag.runs import Run
from rpadiag.sites import REGIONS

# Facts of a stack that can move a bit, by the names that engines write into the manifest.
SETUP = (
    "engine", "vllm_version", "dtype", "device", "device_name", "attention", "attention_backend", "enforce_eager", "compile_mode",
    "cudagraph_mode", "custom_ops", "logprobs_mode", "prefix_caching", "cache_dtype", "quantization", "aligned",
)  # fmt: skip
NOTABLE_SHARE = 0.01  # of a region's elements, in what is made locally


def changes_between(baseline: Run, run: Run) -> list[Finding]:
    """Findings, most telling first: contracts, local divergence, setup, packages. Empty: nothing recorded changed."""
    versions = f"baseline {_stack(baseline)}, now {_stack(run)}"
    found = [
        *_contracts(baseline, run, versions),
        *_local(baseline, run, versions),
        *_setup(baseline.manifest, run.manifest),
        *_packages(baseline.manifest, run.manifest),
    ]
    return sorted(found, key=lambda f: f.rank)


def _stack(run: Run) -> str:
    m = run.manifest
    rollout = m.get("rollout") or {}
    packages = m.get("packages") or {}
    named = m.get("rollout_label") or f"{rollout.get('engine', '')} {rollout.get('vllm_version', '')}".strip()
    trainer = f"transformers {packages['transformers']}" if "transformers" in packages else ""
    return " and ".join(x for x in (str(named or ""), trainer) if x) or "unknown versions"


def _contracts(baseline: Run, run: Run, versions: str) -> list[Finding]:
    before, after = (_found_contracts(r) for r in (baseline, run))
    out = []
    for key in sorted(before.keys() & after.keys()):
        stack, region = key
        axes = _differing(before[key], after[key])
        if axes:
            what = "; ".join(f"{axis}: {a} before, {b} now" for axis, a, b in axes)
            out.append(
                Finding(
                    code="contract-changed",
                    severity="warning",
                    region=region,
                    text=f"The {stack}'s rounding contract of {region} changed ({versions}): {what}.",
                    numbers={"stack": stack, "axes": {axis: [a, b] for axis, a, b in axes}},
                    rank=0,
                )
            )
    return out


def _found_contracts(run: Run) -> dict[tuple[str, str], Mapping[str, Any]]:
    """(stack, region) -> contract, from the run's fingerprint and from the alignment of its trainer."""
    out: dict[tuple[str, str], Mapping[str, Any]] = {}
    found = run.fingerprint
    if found is not None:
        stack = str((found.get("captured") or {}).get("stack", "rollout"))
        for region, contract in (found.get("regions") or {}).items():
            out[(stack, str(region))] = contract
    aligned = (run.manifest.get("trainer") or {}).get("aligned")
    contracts = (aligned.get("contracts") or {}) if isinstance(aligned, Mapping) else {}
    for region, contract in (contracts.get("regions") or contracts).items():
        if isinstance(contract, Mapping):
            out.setdefault(("trainer", str(region)), contract)
    return out


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(k, before.get(k), after.get(k)) for k in dict.fromkeys([*before, *after]) if before.get(k) != after.get(k)]


def _local(baseline: Run, run: Run, versions: str) -> list[Finding]:
    out = []
    shares = [local_shares(r) for r in (baseline, run)]
    for region in REGIONS:
        if any(region not in s for s in shares):
            continue
        before, after = (s[region] for s in shares)
        if abs(after - before) >= NOTABLE_SHARE:
            out.append(
                Finding(
                    code="local-divergence-changed",
                    severity="warning" if after > before else "notice",
                    region=region,
                    text=f"{region} now makes {100 * after:.1f} % of its elements differ, {100 * before:.1f} % before ({versions}): "
                    "one of the stacks rounds at another point there. rpadiag fingerprint on both runs says which.",
                    numbers={"before": before, "after": after},
                    rank=1,
                )
            )
    return out


def _setup(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Finding]:
    out = []
    for stack in ("trainer", "rollout"):
        a, b = (m.get(stack) or {} for m in (before, after))
        if not a or not b:
            continue
        moved = [(k, a.get(k), b.get(k)) for k in SETUP if a.get(k) != b.get(k)]
        if moved:
            what = "; ".join(f"{k} {_short(x)} before, {_short(y)} now" for k, x, y in moved)
            out.append(
                Finding(
                    code="setup-changed",
                    severity="notice",
                    text=f"The {stack} stack runs differently: {what}.",
                    numbers={"stack": stack, "changed": {k: [x, y] for k, x, y in moved}},
                    rank=2,
                )
            )
    return out


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_short(v)}" for k, v in value.items() if not isinstance(v, Mapping)) or "set"
    if isinstance(value, list):
        return " and ".join(map(str, value)) or "none"
    text = "nothing" if value is None else str(value)
    return text.rsplit("/", 1)[-1] if text.startswith("/") else text  # a path says where, not what


def _packages(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Finding]:
    a, b = (m.get("packages") or {} for m in (before, after))
    moved = [(name, a.get(name, "absent"), b.get(name, "absent")) for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]  # fmt: skip
    if not moved:
        return []
    text = ", ".join(f"{name} {x} to {y}" for name, x, y in moved)
    return [
        Finding(
            code="packages-changed",
            severity="notice",
            text=f"Packages changed since the baseline: {text}.",
            numbers={"changed": {name: [x, y] for name, x, y in moved}},
            rank=3,
        )
    ]
