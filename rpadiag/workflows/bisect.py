"""``rpadiag bisect``: which region's rounding moves the trainer's logprobs, and how sure that is.

Replicates of the trainer, and with ``rollout="vllm"`` of the engine too: the embedding output is moved by a random -1, 0 or +1 ULP per element, the same for every variant,
and the forward is repeated with the regions aligned to the contract in turn. What survives averaging is systematic and belongs
to the region; what does not is chaos, and belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag import __version__
from rpadiag.attribution.attribute import Attribution, attribute
from rpadiag.attribution.design import Replicate, Score, parts_of
from rpadiag.attribution.plan import Plan
from rpadiag.attribution.rows import attribution_rows, effect_rows, summary
from rpadiag.attribution.verdict import findings, verdict
from rpadiag.compare.pairing import Pairing, SequencePair
from rpadiag.findings import Finding, Verdict
from rpadiag.runs import RunWriter, token_digest, weights_digest
from rpadiag.runs.journal import Journal, journaled_run
from rpadiag.sites import region_of
from rpadiag.workflows.bisect_local import LocalEvidence, local_evidence, local_findings
from rpadiag.workflows.bisect_rollout import BothStacks, replicated_rollout
from rpadiag.workflows.bisect_score import PrefixScorer, ScoringCost
from rpadiag.workflows.compare_rows import prompt_row
from rpadiag.workflows.control import subset
from rpadiag.workflows.inputs import Inputs, check_model, load_inputs
from rpadiag.workflows.options import ATTRIBUTABLE_REGIONS, BisectOptions
from rpadiag.workflows.progress import SILENT, Progress
from rpadiag.workflows.rollout import default_preset

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.switches import TrainerSwitches
    from rpadiag.engines.vllm import VllmEngine

LOCAL_TOKENS = 96  # the table by site; a share of millions of elements, which more tokens do not change


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """What a finished bisection answers with."""

    run: Path
    attribution: Attribution
    findings: Sequence[Finding]
    verdict: Verdict


def run_bisect(
    options: BisectOptions, progress: Progress = SILENT, *, given: Mapping[str, Any] | None = None
) -> Bisection:
    """Attribute the systematic part of the trainer's distance from the contract to parts; write ``options.run``.

    With ``options.resume`` the run that an interrupted bisection left there is continued.
    """
    check_model(options, progress)
    with (
        journaled_run(options.run, command="bisect", options=options.to_dict(), given=given, resume=options.resume) as (
            run,
            journal,
        ),
        ExitStack() as stack,
    ):
        inputs = load_inputs(options, progress, attention=options.attention)
        contract = options.contract or default_preset(inputs.device, inputs.dtype)
        stack.enter_context(_products(inputs, run, progress))
        switches = _switches(options, inputs, contract, run)
        run.set_effective(device=inputs.device, dtype=inputs.dtype, contract=contract)
        run.set_manifest(reference_contract=contract)
        prompts = {p.index: p for p in inputs.prompts}
        rows = [prompt_row(prompts[s.prompt], s) for s in inputs.sequences]
        run.add_prompts(rows)
        weights = inputs.trainer.weight_digests()
        run.set_weights("trainer", weights)
        confirm_kind = "batch" if inputs.device.startswith("cuda") else "order"  # a CPU hardly depends on the batch
        plan = plan_of(options, inputs.facts.num_layers, confirm_kind=confirm_kind)
        run.set_manifest(confirming_noise=confirm_kind if options.confirm else None)
        journal.bind(_identity(options, inputs, contract, weights_digest(weights)))
        engine = None
        if options.rollout == "vllm":
            with progress.stage("start vllm engine"):
                engine = stack.enter_context(replicated_rollout(options, inputs, run, weights=weights))
        with progress.stage("local picture"):
            _local_picture(options, inputs, run, switches)
        with progress.stage("first-order effects"):
            local = local_evidence(inputs.trainer, inputs.sequences, switches, plan.parts)
        result, cost = _attribute(plan, inputs, switches, journal, progress, local, engine)
        told = sorted([*findings(result), *local_findings(local)], key=lambda f: f.rank)
        there = {region_of(site) for site in inputs.facts.sites}
        not_asked = [r for r in ATTRIBUTABLE_REGIONS if r in there and r not in options.regions]
        sentence = verdict(result, told, not_asked=not_asked)
        journal.copy_to(run)
        run.add_attribution(attribution_rows(result))
        run.add_effects(effect_rows(result))
        for finding in told:
            run.add_finding(finding)
        run.set_verdict(sentence)
        run.set_metrics({"attribution": summary(result), "scoring": cost.to_dict(), "local": local.to_dict()})
        run.set_manifest(trainer={**inputs.trainer.manifest(), "model": options.model})
    return Bisection(run=options.run, attribution=result, findings=told, verdict=sentence)


def plan_of(options: BisectOptions, num_layers: int, *, confirm_kind: str = "batch") -> Plan:
    """The forwards that these options ask for, of a model with so many layers."""
    units, num_groups = options.units
    return Plan(
        parts=parts_of(options.regions, by=units, num_layers=num_layers, num_groups=num_groups),
        num_replicates=options.replicates,
        seed=options.seed,
        precision=options.precision,
        interactions=options.interactions,
        confirm=options.confirm,
        confirm_kind=confirm_kind,
        rollout=options.rollout != "none",
    )


def _attribute(
    plan: Plan,
    inputs: Inputs,
    switches: TrainerSwitches,
    journal: Journal,
    progress: Progress,
    local: LocalEvidence,
    engine: VllmEngine | None,
) -> tuple[Attribution, ScoringCost]:
    """Score what the journal does not have, write it there, and conclude; and what the scoring took."""
    done = dict(_known(plan, journal))
    if done:
        progress.note(f"resumed: {len(done)} of at most {plan.num_forwards} forwards are there already")
    steps = (plan.num_forwards - len(done)) * len(inputs.sequences)
    with progress.stage("rounding replicates", total=steps) as bar:
        scorer = PrefixScorer(
            inputs.trainer,
            inputs.sequences,
            switches,
            block_replicates=plan.round_size,  # what an interrupt can lose
            on_forward=bar.advance,
        )
        score: Score = scorer
        if engine is not None:
            score = BothStacks(scorer, engine, inputs.sequences, bar.advance)
        result = attribute(
            score,
            plan,
            _sequence_ids(inputs.sequences),
            done=done.items(),
            on_scored=lambda replicate, logprobs: journal.append(_row(replicate, logprobs)),
            local_differing=local.differing,
            local_effects=local.effects,
        )
    return result, scorer.cost


def _row(replicate: Replicate, logprobs: np.ndarray) -> dict[str, Any]:
    """A forward as a row of ``replicates.parquet``."""
    return {
        "design": replicate.variant.design,
        "region": replicate.variant.name,
        "kind": replicate.kind,
        "replicate": replicate.index,
        "seed": replicate.seed,
        "logprobs": logprobs,
    }


def _known(plan: Plan, journal: Journal) -> Iterator[tuple[Replicate, np.ndarray]]:
    """The journal's forwards as replicates of the plan."""
    by_name = {(r.variant.design, r.variant.name, r.kind, r.index, r.seed): r for r in plan.replicates()}
    for row in journal.rows():
        replicate = by_name.get((row["design"], row["region"], row["kind"], row["replicate"], row["seed"]))
        if replicate is not None:
            yield replicate, row["logprobs"]


def _identity(options: BisectOptions, inputs: Inputs, contract: str, weights: str) -> dict[str, Any]:
    """Everything that the replicates depend on. Prompts and model count by their contents, not by how they were named."""
    named = ("run", "resume", "prompts", "model")
    found = Path(contract)
    return {
        "rpadiag": __version__,
        "options": {k: v for k, v in options.to_dict().items() if k not in named},
        "contract": found.read_text(encoding="utf-8") if contract.endswith(".json") else contract,
        "tokens": [token_digest(s.token_ids) for s in inputs.sequences],
        "weights": weights,
        "trainer": {k: v for k, v in inputs.trainer.manifest().items() if k not in ("model", "given")},
    }


def _products(inputs: Inputs, run: RunWriter, progress: Progress) -> AbstractContextManager[None]:
    """FP32 kernels for the matrix products where the CPU has no 16-bit ones: an automatic choice, recorded."""
    from rpadiag.engines.products import fp32_products, has_slow_products

    if not has_slow_products(inputs.trainer.model):
        run.set_manifest(matrix_products="as the trainer computes them")
        return nullcontext()
    progress.note("matrix products by FP32 kernels, rounded at the end: this CPU has no BF16 instructions")
    run.set_manifest(matrix_products="FP32 kernels, rounded at the end (the CPU has no BF16 instructions)")
    return fp32_products(inputs.trainer.model)


def _switches(options: BisectOptions, inputs: Inputs, contract: str, run: RunWriter) -> TrainerSwitches:
    """The trainer's switches; a region that this model lacks is an error before the long work."""
    from rpadiag.engines.products import has_slow_products
    from rpadiag.engines.switches import TrainerSwitches

    model = inputs.trainer.model
    switches = TrainerSwitches(model, contract=contract, wide_products=has_slow_products(model))
    with switches.aligned(dict.fromkeys(options.regions)):
        run.set_manifest(aligned_means={region: switches.regions[region] for region in options.regions})
    return switches


def _sequence_ids(sequences: Sequence[TokenSequence]) -> np.ndarray:
    return np.concatenate([np.full(len(s.token_ids) - 1, i, dtype=np.int64) for i, s in enumerate(sequences)])


def _local_picture(options: BisectOptions, inputs: Inputs, run: RunWriter, switches: TrainerSwitches) -> None:
    """Rows of ``sites.parquet``: the trainer's own operations fed the tensors of the forward with every region aligned."""
    from rpadiag.engines.bundle import BundleWriter, open_bundle

    directory = run.scratch_dir() / "aligned"
    chosen = subset(inputs.sequences, LOCAL_TOKENS)
    sites = [s for s in inputs.facts.sites if s not in ("logits", "logprob")]
    scores = []
    with (
        switches.aligned(dict.fromkeys(options.regions)),
        BundleWriter(directory, {"engine": "trainer", "aligned": list(options.regions)}) as writer,
    ):
        for number, sequence in enumerate(chosen):
            writer.begin(number)
            scored = inputs.trainer.forward(sequence.token_ids, sites=sites, on_site=writer.append)
            writer.end(
                number,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                positions=scored.positions,
                scores=scored,
            )
            scores.append(scored)
    pairing = Pairing(inputs.trainer, sites=sites, precision="model")
    bundle = open_bundle(directory)
    for number, sequence in enumerate(chosen):
        pair = SequencePair(
            prompt=sequence.prompt,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            scores=scores[number],
            capture=bundle.capture(number),
        )
        run.add_sites(pairing.compare(pair)[1])
