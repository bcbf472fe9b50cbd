"""The block of rounding contracts: what each stack follows, side by side, how that is known, and what to set to align them.

A fingerprint of the run is evidence. Without one, the table of known implementations (:mod:`rpadiag.regions.presets`) says what
this version and mode does, and the page says that it was not measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpadiag.contracts import CONTRACT_TYPES, Contract, RmsNormContract, contract_from_dict
from rpadiag.errors import RpadiagError
from rpadiag.regions.presets import PRESETS, Preset
from rpadiag.reports import records
from rpadiag.reports.view import MISSING, Block, Column, Command, Table
from rpadiag.runs import Run
from rpadiag.sites import ALIGN_NAMES

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SITES_OF = {"rope": "q_rope", "swiglu": "act", "rmsnorm": "input_norm", "qk_norm": "q_norm"}
STACKS = ("trainer", "rollout")
SUMS = "residual sums"  # between regions: the carry of a preset or file, set with the norm that reads them
# of these it is not known what a compiled engine carries, and align carries nothing for them
FOUR_NORMS = ("gemma2", "gemma3")
CARRIED = {
    "lp": "each stored in {dtype}",
    "layer": "attention's unrounded where the MLP's is added",
    "stream": "never rounded",
}
# Facts of a stack that move bits outside the contracts: manifest keys (the first that is there), name, and what to do where the two differ.
SETUP: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("dtype",), "dtype", "run both in the same dtype"),
    (("attention", "attention_backend"), "attention", "no rounding position to set: the kernels add in other orders. Batch-invariant kernels on both sides, or accept it"),
    (("enforce_eager",), "mode", "a mode of one stack alone: align the trainer to its contracts"),
    (("quantization",), "quantised weights", "compare without it to see rounding alone"),
    (("cache_dtype",), "KV cache", "compare with the model's dtype to see rounding alone"),
    (("logprobs_mode",), "log-probabilities", "raw_logprobs, or divide the trainer's logits by the temperature"),
    (("prefix_caching",), "prefix caching", "off while comparing"),
    (("tensor_parallel_size",), "tensor parallel", "sums are split over ranks: another order of addition"),
    (("device_name", "device"), "device", ""),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is known of one stack: a contract by region, how that is known, the preset that says it, the fingerprint file if one does.

    carry: which residual sums it rounds (:mod:`rpadiag.regions.align_carry`); None where that is not known.
    """

    contracts: Mapping[str, Contract]
    how: str
    measured: bool = False
    preset: str | None = None
    undetermined: Mapping[str, str] | None = None
    carry: str | None = None


def contracts_block(run: Run, key: str) -> Block | None:
    """None where a run names no stacks, as recorded rollouts do."""
    manifest = run.manifest
    if not (manifest.get("trainer") and manifest.get("rollout")):
        return None
    found = {stack: contracts_of(run, stack) for stack in STACKS}
    regions = _regions(manifest, found)
    dtype = SHORT.get(str((manifest.get("trainer") or {}).get("dtype")), "bf16")
    differing = [r for r in regions if _differ(found, r)]
    if _carries_differ(found):
        differing.append(SUMS)
    tables = [t for t in (_contract_table(regions, found, dtype), setup_table(manifest)) if t is not None]
    return Block(
        key=f"{key}-contracts",
        title="Rounding contracts",
        lead=[_lead(regions, differing, found)],
        tables=tables,
        notes=[f"{stack.capitalize()}: {found[stack].how}." for stack in STACKS],
        commands=_commands(
            run, _to_align(differing, regions, (manifest["trainer"].get("aligned") or {}).get("regions") or ()), found
        ),
    )


def contracts_of(run: Run, stack: str) -> Found:
    """Fingerprint of this stack, else the alignment of the trainer, else what its version and mode are known to do."""
    fingerprint = run.fingerprint or {}
    if fingerprint and (fingerprint.get("captured") or {}).get("stack", "rollout") == stack:
        layers = fingerprint.get("layers") or {}
        determined = sum(1 for f in layers.values() if f.get("status") == "determined")
        same = fingerprint.get("presets") or []
        as_known = f", as {', '.join(map(str, same[:3]))}" if same else ""
        return Found(
            contracts=_read(fingerprint.get("regions") or {}),
            how=f"fingerprinted bit for bit on {determined} of {len(layers)} sites of this run{as_known}",
            measured=True,
            undetermined=fingerprint.get("undetermined") or {},
            carry=_carry(fingerprint.get("carry")),
        )
    facts = run.manifest.get(stack) or {}
    offset = str(facts.get("family", "")).startswith("gemma")
    base = known_of(stack, facts, run.manifest, offset=offset)
    aligned = facts.get("aligned")
    if isinstance(aligned, Mapping):
        contracts = aligned.get("contracts") or {}
        set_here = _read(contracts.get("regions") or contracts)
        named = ", ".join(map(str, aligned.get("regions") or set_here))
        return Found(
            contracts={**base.contracts, **set_here},
            how=f"aligned in {named} to {str(aligned.get('contract')).rsplit('/', 1)[-1]}, otherwise {base.how}",
            measured=base.measured,
            preset=base.preset,
            carry=_carry(contracts.get("carry")) or base.carry,
        )
    return base


def _carry(value: Any) -> str | None:
    return str(value) if value in CARRIED else None


def known_of(stack: str, facts: Mapping[str, Any], manifest: Mapping[str, Any], *, offset: bool = False) -> Found:
    """What the table of implementations says of a stack that was not fingerprinted."""
    name, why = _preset_name(facts, manifest)
    if name is None:
        return Found(contracts={}, how=why)
    preset = PRESETS[name]
    untold = preset.carry != "lp" and str(facts.get("family", "")).startswith(FOUR_NORMS)
    label = _label(stack, facts, manifest)
    return Found(
        contracts=_of_preset(preset, offset=offset),
        how=f"{label}, known as {name} ({preset.versions}); {why}",
        preset="fp32-output" if untold else name,
        carry=None if untold else preset.carry,
    )


def _preset_name(facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> tuple[str | None, str]:
    """(preset, how sure that is), or (None, why there is none)."""
    engine = str(facts.get("engine", ""))
    if facts.get("preset") in PRESETS:
        return str(facts["preset"]), "set by the emulation"
    unmeasured = "read off its version and mode, not measured in this run"
    if engine == "transformers":
        return "hf-eager", unmeasured
    if engine != "vllm":
        return None, f"no contracts are known of {engine or 'this engine'}; rpadiag fingerprint finds them"
    if str(facts.get("device", "")).startswith("cpu"):
        if not facts.get("enforce_eager", True):
            return "vllm-cpu-compiled", unmeasured
        isa = ((manifest.get("devices") or {}).get("cpu") or {}).get("isa") or []
        truncates = facts.get("dtype") != "float16" and "avx512_bf16" not in isa
        return ("vllm-cpu-avx2" if truncates else "vllm-cpu"), unmeasured
    if not facts.get("enforce_eager", False):
        return "vllm-compiled", unmeasured
    return ("vllm-eager-0.19" if _minor(facts.get("vllm_version")) < 20 else "vllm-eager"), unmeasured


def _minor(version: Any) -> int:
    parts = str(version or "").split(".")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "0" and parts[1].isdigit() else 99


def _label(stack: str, facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    if stack == "rollout":
        named = manifest.get("rollout_label") or f"{facts.get('engine', '')} {facts.get('vllm_version', '')}".strip()
        return str(named)
    version = (manifest.get("packages") or {}).get("transformers") or (facts.get("versions") or {}).get("transformers")
    return f"transformers {version}" if version else "transformers"


def _of_preset(preset: Preset, *, offset: bool) -> dict[str, Contract]:
    contracts = dict(preset.regions)
    if "rmsnorm" in contracts:
        contracts["rmsnorm"] = preset.rmsnorm(offset=offset)
    return contracts


def _read(regions: Mapping[str, Any]) -> dict[str, Contract]:
    """Contracts of a manifest or fingerprint; those that this version cannot read are left out."""
    out = {}
    for region, axes in regions.items():
        if isinstance(axes, Mapping) and region in CONTRACT_TYPES:
            try:
                out[str(region)] = contract_from_dict({**axes, "region": region})
            except (RpadiagError, TypeError):
                continue
    return out


def _regions(manifest: Mapping[str, Any], found: Mapping[str, Found]) -> list[str]:
    """Regions that the model has and at least one side says something about."""
    absent = (manifest.get("sites") or {}).get("absent") or {}
    return [
        r
        for r in CONTRACT_TYPES
        if SITES_OF[r] not in absent and any(r in f.contracts or r in (f.undetermined or {}) for f in found.values())
    ]


def _axes(contract: Contract) -> dict[str, str]:
    """The axes that say where values are rounded (level one)."""
    return {a.name: str(getattr(contract, a.name)) for a in contract.axes if a.level == 1}


def _both(found: Mapping[str, Found], region: str) -> tuple[Contract, Contract] | None:
    a, b = (found[s].contracts.get(region) for s in STACKS)
    return None if a is None or b is None else (a, b)


def _differ(found: Mapping[str, Found], region: str) -> list[str]:
    """Axes at which the stacks round differently; empty where they agree or one is not known."""
    both = _both(found, region)
    if both is None:
        return []
    a, b = (_axes(c) for c in both)
    if isinstance(both[0], RmsNormContract) and a["sum"] == b["sum"] == "lp":
        a["variance"] = b["variance"] = ""  # a sum that was rounded is squared as rounded either way
    return [axis for axis in a if a[axis] != b.get(axis)]


def _carries_differ(found: Mapping[str, Found]) -> bool:
    carries = {found[s].carry for s in STACKS}
    return None not in carries and len(carries) > 1


def _contract_table(regions: Sequence[str], found: Mapping[str, Found], dtype: str) -> Table | None:
    if not regions:
        return None
    rows: list[list[str]] = []
    emphasis: list[int] = []
    for region in regions:
        axes = _differ(found, region)
        both = _both(found, region)
        if axes:
            emphasis.append(len(rows))
        rows.append(
            [
                region,
                *(_words(found[s], region, dtype) for s in STACKS),
                "not known" if both is None else "same" if not axes else "\n".join(_axis_words(both, x, dtype) for x in axes),
                _to_set(region, axes, known=both is not None),
            ]
        )  # fmt: skip
    carries = [found[s].carry for s in STACKS]
    if any(c not in (None, "lp") for c in carries):  # every sum stored is what nobody needs to be told
        differ = _carries_differ(found)
        if differ:
            emphasis.append(len(rows))
        words = [CARRIED[c].format(dtype=dtype) if c is not None else "not known" for c in carries]
        part = f"{words[0]} against {words[1]}" if differ else "not known" if None in carries else "same"
        rows.append([SUMS, *words, part, _to_set("rmsnorm", [SUMS] if differ else [], known=None not in carries)])
    titles = ("region", "trainer", "rollout", "where they part", "to align")
    return Table(
        caption="Where each stack rounds, by region",
        columns=[Column(title=t, numeric=False) for t in titles],
        rows=rows,
        emphasis=emphasis,
    )


def _words(found: Found, region: str, dtype: str) -> str:
    contract = found.contracts.get(region)
    if contract is not None:
        plain = type(contract)()
        shown = (
            a
            for a in contract.axes
            if a.named or (a.level in (1, 2) and getattr(contract, a.name) != getattr(plain, a.name))
        )
        return ", ".join(f"{a.name} {_plainly(str(getattr(contract, a.name)).replace('lp', dtype))}" for a in shown)
    return (found.undetermined or {}).get(region, "not known")


def _axis_words(both: tuple[Contract, Contract], axis: str, dtype: str) -> str:
    a, b = (str(getattr(c, axis)).replace("lp", dtype) for c in both)
    return f"{axis}: {_plainly(a)} against {_plainly(b)}"


def _plainly(value: str) -> str:
    return {"rne": "to nearest", "truncate": "toward zero", "--": "no fused product"}.get(value, value)


def _to_set(region: str, axes: Sequence[str], *, known: bool) -> str:
    if not known:
        return "rpadiag fingerprint on this run"
    if not axes:
        return "nothing"
    return f"--align {region}"


def _to_align(differing: Sequence[str], regions: Sequence[str], aligned: Sequence[str]) -> list[str]:
    """Regions to align: those that differ, query and key norms with the norm whose contract they follow, and those that are aligned already."""
    needed = {"rmsnorm" if region == SUMS else region for region in differing}
    if not needed:
        return []
    if "rmsnorm" in needed and "qk_norm" in regions:
        needed.add("qk_norm")
    return [r for r in ALIGN_NAMES if r in needed or r in aligned]


def _lead(regions: Sequence[str], differing: Sequence[str], found: Mapping[str, Found]) -> str:
    if not regions:
        return "No rounding contract is known of one of the stacks. rpadiag fingerprint reads it off the run's own tensors."
    measured = [s for s in STACKS if found[s].measured]
    sure = (
        f"The {' and the '.join(measured)} was fingerprinted in this run."
        if measured
        else "Neither stack was fingerprinted in this run, so this is what their versions are known to do: rpadiag fingerprint measures it."
    )
    if not differing:
        return f"A contract says at which points a region rounds to 16 bits. Both stacks round at the same points in {_list(regions)}. {sure}"
    return f"A contract says at which points a region rounds to 16 bits. The stacks part in {_list(differing)}. {sure}"


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _commands(run: Run, regions: Sequence[str], found: Mapping[str, Found]) -> list[Command]:
    """What aligns the trainer to the rollout, in a training script and in the next comparison; and the fingerprint where none was made."""
    rollout = found["rollout"]
    where = records.directory_of(run)
    contract = f"{where}/fingerprint.json" if rollout.measured else rollout.preset
    out = []
    if not rollout.measured:
        out.append(
            Command(
                text="Measure the rollout's contracts, which runs that stack on the run's tokens again:",
                code=f"rpadiag fingerprint {shlex.quote(where)}",
            )
        )
    if not regions or not contract:
        return out
    named = ", ".join(json.dumps(r) for r in regions) + ("," if len(regions) == 1 else "")
    out.append(
        Command(
            text="Give the trainer the rollout's rounding positions, in the training script:",
            code=f"import rpadiag\n\nwith rpadiag.align(model, regions=({named}), contract={json.dumps(contract)}):\n    ...  # forward and backward",
        )
    )
    if "trainer" not in records.effective_options(run.manifest):  # two bundles are as they were captured
        again = records.command_line(run.manifest, align=list(regions), contract=contract, run=f"{where}-aligned")
        out.append(Command(text="See what that leaves:", code=again))
    return out


def setup_table(manifest: Mapping[str, Any]) -> Table | None:
    """What else moves bits, by stack."""
    sides = [manifest.get(s) or {} for s in STACKS]
    rows: list[list[str]] = []
    emphasis: list[int] = []
    for keys, title, advice in SETUP:
        values = [next((facts[k] for k in keys if facts.get(k) is not None), None) for facts in sides]
        if all(v is None for v in values):
            continue
        shown = [_setting(title, v, facts) for v, facts in zip(values, sides, strict=True)]
        differs = None not in values and shown[0] != shown[1]
        if differs and advice:
            emphasis.append(len(rows))
        rows.append([title, *shown, advice if differs or (values[0] is None and _narrow(title, values[1])) else ""])
    if not rows:
        return None
    return Table(
        caption="What else moves bits, by stack",
        columns=[Column(title=t, numeric=False) for t in ("setting", "trainer", "rollout", "what to do")],
        rows=rows,
        emphasis=emphasis,
    )


def _setting(title: str, value: Any, facts: Mapping[str, Any]) -> str:
    if title == "mode" and isinstance(value, bool):
        return "eager" if value else f"compiled ({facts.get('compile_mode') or 'default'})"
    if isinstance(value, bool):
        return "on" if value else "off"
    return MISSING if value is None else str(value)


def _narrow(title: str, value: Any) -> bool:
    """A setting of the rollout alone that a comparison should not have."""
    if title == "quantised weights":
        return bool(value)
    if title == "KV cache":
        return str(value) not in ("auto", "None")
    if title == "log-probabilities":
        return str(value) != "raw_logprobs"
    return title in ("prefix caching",) and value is True
