"""Sampling as a rollout does it, and the same tokens scored in the ways that tell decode noise from a difference of stacks.

Tokens are sampled in one batch of many, as in reinforcement learning, and the logprobs that vLLM sampled with are what the
trainer is held against. The same tokens are then decoded one sequence at a time, where sites are captured, and scored once more as
prompts. So three distances are known: trainer to sampled, trainer to rescored, and vLLM to itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.findings import Finding
from rpadiag.workflows.inputs import Inputs
from rpadiag.workflows.options import CompareOptions
from rpadiag.workflows.progress import Progress
from rpadiag.workflows.rollout import Rollout

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenScores, TokenSequence


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Prompts with the tokens sampled after them. All lists are in the order of the prompts.

    scores: as sampled. rescored: of the same tokens as prompts; None for an emulation, which scores in one forward anyway.
    """

    sequences: Sequence[TokenSequence]
    scores: Sequence[TokenScores]
    rescored: Sequence[TokenScores] | None

    def merged(self, index: int, alone: TokenScores) -> TokenScores:
        """Scores of the prompt as it was scored alone, and of the generated tokens as they were sampled."""
        start, drawn = self.sequences[index].num_prompt_tokens - 1, self.scores[index]
        names = ("logprob", "entropy", "rank", "argmax")
        joined = {n: np.concatenate([getattr(alone, n)[:start], getattr(drawn, n)[start:]]) for n in names}
        return dataclasses.replace(alone, **joined)


def sampling_of(options: CompareOptions) -> dict[str, Any]:
    """Arguments of sampling, by the names of :meth:`rpadiag.engines.vllm.VllmEngine.score`."""
    return {"temperature": options.temperature, "top_p": options.top_p}


def sample_tokens(options: CompareOptions, inputs: Inputs, rollout: Rollout, progress: Progress) -> Sampled | None:
    """Let the rollout sample ``options.generate`` tokens after each prompt; None where none are asked for."""
    if not options.generate:
        return None
    with progress.stage("sample tokens", total=2 * len(inputs.sequences)) as bar:
        results = rollout.engine.score(
            inputs.sequences,
            num_generate=options.generate,
            together=rollout.real,
            seed=options.seed,
            on_finished=lambda _index: bar.advance(),
            **sampling_of(options),
        )
        sequences = [r.sequence for r in results]
        rescored = None
        if rollout.real:
            again = rollout.engine.score([as_prompt(s) for s in sequences], on_finished=lambda _index: bar.advance())
            rescored = [r.scores for r in again]
    return Sampled(sequences=sequences, scores=[r.scores for r in results], rescored=rescored)


def as_prompt(sequence: TokenSequence) -> TokenSequence:
    """The same tokens with nothing generated."""
    return dataclasses.replace(sequence, num_prompt_tokens=len(sequence.token_ids))


def decode_finding(by_source: Mapping[str, Mapping[str, Any]], floors: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """One sentence: how far the trainer is from what was sampled, from the same tokens rescored, and the rollout from itself."""
    if "decode" not in by_source or "rescored" not in by_source:
        return []
    sampled, rescored = (float(by_source[name]["mean_abs_d"]) for name in ("decode", "rescored"))
    own = {f["name"]: float(f["mean_abs_d"]) for f in floors}
    numbers = {
        "mean_abs_d_sampled": sampled,
        "mean_abs_d_rescored": rescored,
        "mean_abs_d_rollout_itself": own.get("rollout_rescored"),
        "num_tokens": int(by_source["decode"]["num_tokens"]),
    }
    text = (
        f"Generated tokens: the trainer is {sampled:.3g} nats (mean |d|, n = {numbers['num_tokens']:,}) from the logprobs that they were "
        f"sampled with, and {rescored:.3g} from the rollout's own rescoring of them as prompts"
    )
    if "rollout_rescored" in own:
        text += f"; the rollout is {own['rollout_rescored']:.3g} from itself between the two"
    return [Finding(code="decode", severity="info", text=f"{text}.", region="sampling", numbers=numbers, rank=4)]
