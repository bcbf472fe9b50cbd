"""From runs to the sections of a page: which blocks there are, in which order, and what each says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rpadiag.findings import NUM_FINDINGS, Judgement, most_important_first, one_of_each_kind
from rpadiag.reports import blocks, blocks_attribution, blocks_contracts, blocks_gates, records, sequences
from rpadiag.reports.reading import read_histograms, read_sites, read_tokens
from rpadiag.reports.view import Block, Section, Statement, Tile, count, is_missing, number, percent, plural, spoken
from rpadiag.runs import Run


def build(runs: Sequence[Run], key: str) -> Section:
    """One section. The first run gives headline and sites; a bisect run anywhere in ``runs`` gives the attribution."""
    bisects = [r for r in runs if r.has("attribution")]
    parts = tuple(b for b in _blocks(runs[0], bisects, key) if b is not None)
    return replace(headline(runs), key=key, blocks=parts, records=tuple(records.record(r) for r in runs))


def judged(section: Section, judgement: Judgement) -> Section:
    """The section with the gates and what changed since the baseline as its first blocks."""
    first = (blocks_gates.gates_block(judgement), blocks_gates.changes_block(judgement))
    return replace(section, blocks=(*(b for b in first if b is not None), *section.blocks))


def headline(runs: Sequence[Run]) -> Section:
    """A section without its blocks: what the runs are of, the verdict, the first numbers, the findings."""
    main = runs[0]
    verdict = main.verdict
    shown, further = _findings(runs, verdict)
    return Section(
        key="",
        title=_title(main),
        subtitle=_subtitle(runs),
        kind=str(verdict["kind"]) if verdict else None,
        sentence=spoken(_without_kind(verdict)) if verdict else None,
        stacks=records.stack_lines(main.manifest),
        tiles=_tiles(main.metrics),
        findings=shown,
        further=further,
    )


def _without_kind(verdict: Mapping[str, Any]) -> str:
    """The sentence without a leading "Rounding only:", which the badge above it says."""
    sentence, lead = str(verdict["sentence"]), f"{verdict['kind']}:"
    if not sentence.lower().startswith(lead):
        return sentence
    rest = sentence[len(lead) :].lstrip()
    return rest[:1].upper() + rest[1:]


def _title(run: Run) -> str:
    name = records.model_name(run.manifest)
    what = {
        "compare": "Trainer against rollout",
        "bisect": "Which region is responsible",
        "rollouts": "Recorded rollouts",
    }
    return f"{what.get(str(run.manifest.get('command')), 'Run')}: {name}"


def _subtitle(runs: Sequence[Run]) -> str:
    prompts = runs[0].prompts(["num_tokens"])
    parts = [plural(len(prompts), "prompt"), plural(int(prompts["num_tokens"].sum()), "token")] if len(prompts) else []
    parts.append(str(runs[0].manifest.get("started_utc", ""))[:10])
    return ", ".join(p for p in parts if p)


def _findings(runs: Sequence[Run], verdict: Mapping[str, Any] | None) -> tuple[list[Statement], list[Statement]]:
    """Findings of all runs, the first few apart. The verdict's sentence is not repeated.

    Of a comparison beside a bisection those come first that each say another thing.
    """
    seen: set[str] = {str(verdict["sentence"])} if verdict else set()
    ranked = most_important_first(f for r in runs for f in r.findings)
    first: list[dict[str, Any]] = []
    if len(runs) > 1:
        answer = next((str(r.verdict["sentence"]) for r in runs if r.has("attribution") and r.verdict), "")
        first = one_of_each_kind(ranked, answer=answer)[:NUM_FINDINGS]
    statements = []
    for f in (*first, *ranked):
        if f["text"] not in seen:
            seen.add(f["text"])
            statements.append(
                Statement(severity=f["severity"], text=spoken(f["text"]), about=f.get("site") or f.get("region"))
            )
    return statements[:NUM_FINDINGS], statements[NUM_FINDINGS:]


def _tiles(metrics: Mapping[str, Any]) -> list[Tile]:
    values = (metrics.get("logprob") or {}).get("all") or {}
    if not values:
        return []
    floors = [f for f in metrics.get("floors") or [] if not is_missing(f.get("mean_abs_d"))]
    highest = {str(f["stack"]): 0.0 for f in floors}
    for f in floors:
        highest[str(f["stack"])] = max(highest[str(f["stack"])], float(f["mean_abs_d"]))
    beside = ", ".join(f"{stack} {number(value, 2)}" for stack, value in highest.items())
    generated = int(((metrics.get("logprob") or {}).get("decode") or {}).get("num_tokens") or 0)
    tokens = f"n = {count(values.get('num_tokens'))} tokens" + (f", {count(generated)} generated" if generated else "")
    tiles = [
        Tile(
            label="Mean |d| per token",
            value=number(values.get("mean_abs_d")),
            unit="nats",
            compare=f"noise floors: {beside}" if beside else tokens,
        ),
        Tile(label="KL rollout \u2016 trainer (k3)", value=number(values.get("k3_kl")), unit="nats", compare=tokens),
        Tile(
            label="Ratio outside 0.8 to 1.2",
            value=percent(values.get("outside_ratio_share")),
            unit="",
            compare="of tokens, the usual clipping range",
        ),
        Tile(
            label="Effective sample size",
            value=percent(values.get("rollout_is_eff_sample_size")),
            unit="",
            compare="left by importance weighting",
        ),
        Tile(
            label="Exactly equal",
            value=percent(values.get("exact_share")),
            unit="",
            compare="of tokens, to the last bit",
        ),
    ]
    return [t for t in tiles if t.value != number(None)]


def _blocks(main: Run, bisects: Sequence[Run], key: str) -> list[Block | None]:
    sites = read_sites(main)
    tokens, scored = read_tokens(main)
    compared = main.manifest.get("command") != "bisect"
    where = blocks.sites_block(main, sites, read_histograms(main), key, compared=compared)
    which = [
        blocks_attribution.attribution_block(b, f"{key}-attribution{'' if i == 0 else i + 1}", alone=b is main)
        for i, b in enumerate(bisects)
    ]
    return [
        *([where, *which] if compared else [*which, where]),
        blocks.logprob_block(scored, key),
        sequences.sequences_block(main, scored, key),
        blocks.worst_block(tokens, scored, key),
        blocks_contracts.contracts_block(main, key),
        blocks.floors_block(main, key),
        blocks.control_block(main, sites, key),
        blocks.metrics_block(main.metrics, key),
    ]
