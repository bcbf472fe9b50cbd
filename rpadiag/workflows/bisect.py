"""``rpadiag bisect``: which region's rounding moves the trainer's logprobs, and how sure that is.

Trainer-side replicates: the embedding output is moved by a random -1, 0 or +1 ULP per element, the same for every variant,
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

from rpadiag.attribution.attribute import Attribution, attribute, findings
from rpadiag.attribution.design import Replicate, Variant, layers_by_region, parts_of, variants_of
from rpadiag.compare.pairing import Pairing, SequencePair
from rpadiag.findings import Finding, Verdict
from rpadiag.runs import RunWriter, create_run
from rpadiag.workflows.compare_rows import prompt_row
from rpadiag.workflows.control import subset
from rpadiag.workflows.inputs import Inputs, load_inputs
from rpadiag.workflows.options import BisectOptions
from rpadiag.workflows.progress import SILENT, Progress, Stage
from rpadiag.workflows.rollout import default_preset

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence

LOCAL_TOKENS = 256  # the local picture is a share of millions of elements; more tokens do not change it


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
    """Attribute the systematic part of the trainer's distance from the contract to regions; write ``options.run``."""
    with (
        create_run(options.run, command="bisect", options=options.to_dict(), given=given or {}) as run,
        ExitStack() as stack,
    ):
        inputs = load_inputs(options, progress, attention=options.attention)
        contract = options.contract or default_preset(inputs.device, inputs.dtype)
        stack.enter_context(_products(inputs, run, progress))
        run.set_effective(device=inputs.device, dtype=inputs.dtype, contract=contract)
        run.set_manifest(reference_contract=contract)
        prompts = {p.index: p for p in inputs.prompts}
        run.add_prompts([prompt_row(prompts[s.prompt], s) for s in inputs.sequences])
        run.set_weights("trainer", inputs.trainer.weight_digests())
        with progress.stage("local picture"):
            local = _local_picture(options, inputs, run, contract)
        total = len(variants_of(parts_of(options.regions))) * options.replicates * len(inputs.sequences)
        with progress.stage("rounding replicates", total=total) as bar:
            scorer = _Scorer(inputs, contract, stack, bar)
            result = attribute(
                scorer.score,
                options.regions,
                _sequence_ids(inputs.sequences),
                num_replicates=options.replicates,
                seed=options.seed,
                local_differing=local,
            )
        told = findings(result)
        verdict = _verdict(result, told)
        run.add_attribution(result.rows())
        for finding in told:
            run.add_finding(finding)
        run.set_verdict(verdict)
        run.set_metrics({"attribution": {"ranked": result.ranked, "saturated": result.saturated}})
        run.set_manifest(trainer={**inputs.trainer.manifest(), "model": options.model})
    return Bisection(run=options.run, attribution=result, findings=told, verdict=verdict)


def _products(inputs: Inputs, run: RunWriter, progress: Progress) -> AbstractContextManager[None]:
    """FP32 kernels for the matrix products where the CPU has no 16-bit ones: an automatic choice, recorded."""
    from rpadiag.engines.products import fp32_products, has_slow_products

    if not has_slow_products(inputs.trainer.model):
        run.set_manifest(matrix_products="as the trainer computes them")
        return nullcontext()
    progress.note("matrix products by FP32 kernels, rounded at the end: this CPU has no BF16 instructions")
    run.set_manifest(matrix_products="FP32 kernels, rounded at the end (the CPU has no BF16 instructions)")
    return fp32_products(inputs.trainer.model)


class _Scorer:
    """Scores replicates; the trainer is aligned once per variant, since replicates arrive variant by variant."""

    def __init__(self, inputs: Inputs, contract: str, stack: ExitStack, bar: Stage) -> None:
        self._contract = contract
        self._inputs = inputs
        self._bar = bar
        self._variant: Variant | None = None
        self._aligned = stack.enter_context(ExitStack())

    def score(self, replicates: Sequence[Replicate]) -> Iterator[tuple[Replicate, np.ndarray]]:
        """Logprobs of every scored token of every sequence, [num_tokens], nats."""
        for replicate in replicates:
            yield replicate, self._logprobs(replicate)

    def _logprobs(self, replicate: Replicate) -> np.ndarray:
        if replicate.variant != self._variant:
            self._aligned.close()
            if replicate.variant.aligned:
                from rpadiag.regions.align import align

                self._aligned.enter_context(
                    align(
                        self._inputs.trainer.model,
                        regions=tuple(layers_by_region(replicate.variant.aligned, self._inputs.facts.num_layers)),
                        contract=self._contract,
                    )
                )
            self._variant = replicate.variant
        out = []
        for number, sequence in enumerate(self._inputs.sequences):
            offsets = _offsets(len(sequence.token_ids), self._inputs.facts.hidden_size, replicate.seed, number)
            out.append(self._inputs.trainer.forward_with_embedding_offset(sequence.token_ids, offsets).logprob)
            self._bar.advance()
        return np.concatenate(out).astype(np.float64)


def _offsets(num_tokens: int, hidden_size: int, seed: int, number: int) -> Any:
    """-1, 0 or +1 per element of one sequence's embedding, int8 [T, hidden]; the same on every machine."""
    import torch

    drawn = np.random.default_rng([seed, number]).integers(-1, 2, size=(num_tokens, hidden_size), dtype=np.int8)
    return torch.from_numpy(drawn)


def _sequence_ids(sequences: Sequence[TokenSequence]) -> np.ndarray:
    return np.concatenate([np.full(len(s.token_ids) - 1, i, dtype=np.int64) for i, s in enumerate(sequences)])


def _local_picture(options: BisectOptions, inputs: Inputs, run: RunWriter, contract: str) -> dict[str, float]:
    """Share of elements of each region that differ when the trainer's own operation is fed the aligned forward's input."""
    from rpadiag.engines.bundle import BundleWriter, open_bundle
    from rpadiag.regions.align import align

    directory = run.scratch_dir() / "aligned"
    chosen = subset(inputs.sequences, LOCAL_TOKENS)
    sites = [s for s in inputs.facts.sites if s not in ("logits", "logprob")]
    scores = []
    with (
        align(inputs.trainer.model, regions=options.regions, contract=contract),
        BundleWriter(directory, {"engine": "trainer", "contract": contract}) as writer,
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
    return {region: stats.differing for region, stats in pairing.aggregate.local_by_region().items()}


def _verdict(result: Attribution, told: Sequence[Finding]) -> Verdict:
    each = sorted(result.by_design("each").items(), key=lambda item: -item[1].systematic_sq)
    seen = [(r, e) for r, e in each if e.detectable]
    if not result.ranked:
        sentence = "No answer: the self-control failed, so no region is ranked. Use more replicates or more tokens."
    elif not seen:
        chaotic = result.by_design("all")["all"].chaotic_rms
        sentence = (
            f"No region's systematic part can be told from zero with {each[0][1].num_replicates} replicates and {each[0][1].num_tokens} tokens; "
            f"what is left is chaos, {chaotic:.3f} nats rms per token."
        )
    else:
        parts = ", ".join(f"{r} {e.systematic_sq:.1e} ± {e.systematic_sq_se:.1e}" for r, e in seen)
        hidden = [r for r, e in each if not e.detectable]
        rest = f"; {', '.join(hidden)} cannot be told from zero" if hidden else ""
        sentence = f"Systematic divergence comes from {parts} nats²{rest}. Align {seen[0][0]} first."
    return Verdict(kind="attributed" if result.ranked else "inconclusive", sentence=sentence, evidence=tuple(told))
