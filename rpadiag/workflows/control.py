"""The FP32 control: both stacks again in FP32, where rounding vanishes and mistakes stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rpadiag.compare.aggregate import Aggregate
from rpadiag.compare.evidence import Control, most_suspicious
from rpadiag.compare.pairing import Pairing, SequencePair
from rpadiag.findings import Finding
from rpadiag.runs import RunWriter
from rpadiag.sites import split_site
from rpadiag.workflows.inputs import Inputs, load_trainer
from rpadiag.workflows.options import CompareOptions
from rpadiag.workflows.progress import Progress
from rpadiag.workflows.rollout import Rollout
from rpadiag.workflows.sharding import ranks_now

if TYPE_CHECKING:
    from rpadiag.engines.base import TokenSequence
    from rpadiag.engines.trainer import TrainerEngine

CONTROL_TOKENS = 256  # a mistake shows on every token; more tokens cost time and tell nothing new
HEADROOM_BYTES = 2 << 30  # activations and the engine's own buffers, beside two FP32 copies of the weights


def fp32_control(
    options: CompareOptions,
    inputs: Inputs,
    rollout: Rollout,
    run: RunWriter,
    progress: Progress,
    *,
    sequences: Sequence[TokenSequence],
    sites: Sequence[str],
    prepare_trainer: Callable[[Any], None] | None,
) -> Control:
    """Run the control, or say why there is none. Leaves the rollout engine in FP32."""
    reason = _why_not(options, inputs)
    if reason is not None:
        progress.note(f"no FP32 control: {reason}")
        return Control(reason=reason)
    from rpadiag.workflows.compare import captured_one_by_one, with_inputs

    chosen = subset(sequences, CONTROL_TOKENS)
    with progress.stage("FP32 control", total=len(chosen)) as bar:
        trainer = load_trainer(
            options, model=inputs.model, device=inputs.device, dtype="float32", attention=options.attention
        )
        if prepare_trainer is not None:
            prepare_trainer(trainer)
        rollout.engine.reload(dtype="float32")
        pairing = Pairing(trainer, sites=sites, precision="fp32", experts_per_token=trainer.facts.experts_per_token)
        differences = []
        scratch = run.scratch_dir() / "fp32"
        scratch.mkdir(exist_ok=True)
        for result, capture in captured_one_by_one(rollout, chosen, sites=with_inputs(sites, inputs), scratch=scratch):
            pair = SequencePair(
                prompt=result.sequence.prompt,
                token_ids=result.sequence.token_ids,
                num_prompt_tokens=len(result.sequence.token_ids),
                scores=result.scores,
                capture=capture,
            )
            scores, rows = pairing.compare(pair)
            run.add_sites(rows)
            differences.append(np.abs(scores.logprob.astype(np.float64) - result.scores.logprob))
            bar.advance()
        explained = _explain(trainer, rollout, pairing.aggregate, chosen[0], scratch / "suspect")
    every = np.concatenate(differences)
    return Control(
        aggregate=pairing.aggregate, mean_abs_d=float(every.mean()), num_tokens=len(every), explained=explained
    )


def _explain(
    trainer: TrainerEngine, rollout: Rollout, aggregate: Aggregate, sequence: TokenSequence, directory: Path
) -> tuple[Finding, ...]:
    """What kind of fault the most suspicious operation has: one more capture of it and of what it reads, in FP32."""
    site = most_suspicious(aggregate)
    if site is None or ranks_now() is not None:  # the fault is solved from weights, which are cut over ranks
        return ()
    import torch

    from rpadiag.compare.diagnose_operation import diagnose_operation
    from rpadiag.engines.bundle import open_bundle
    from rpadiag.workflows.fingerprint_sites import inv_freq_of

    reads = trainer.reads(site)
    rollout.engine.score([sequence], sites=[site, *reads], bundle_dir=directory)
    capture = open_bundle(directory).capture(0)
    given = {name: capture.read(name) for name in reads}
    positions = None if capture.positions is None else torch.as_tensor(capture.positions)
    path, _ = trainer.family.source(site, stack="trainer", num_layers=trainer.facts.num_layers)
    point = split_site(site)[1]
    module: Any = trainer.model.get_submodule(path) if point.endswith("norm") else None
    rotary = layer = None
    if point.endswith("rope"):
        rotary = trainer.model.get_submodule(trainer.family.trainer_rotary)
        layer = trainer.model.get_submodule(path.rpartition(".")[0])
    found = diagnose_operation(
        site,
        trainer.replay(site, list(given.values()), positions=positions),
        capture.read(site),
        given,
        head_dim=trainer.facts.head_dim,
        positions=positions,
        weight=getattr(module, "weight", None),
        eps=getattr(module, "variance_epsilon", None),
        inv_freq=None if rotary is None else inv_freq_of(rotary, layer),
    )
    # only what holds bit for bit or was solved from the data is passed on; a likeness would be a guess
    return tuple(replace(f, site=site, rank=0) for f in found[:1] if f.numbers.get("proof") in ("identity", "solved"))


def subset(sequences: Sequence[TokenSequence], budget: int) -> list[TokenSequence]:
    """Whole sequences as prompts while they fit the budget; the first is cut to it if it alone is longer."""
    from rpadiag.engines.base import TokenSequence

    out: list[TokenSequence] = []
    left = budget
    for sequence in sequences:
        ids = sequence.token_ids[:budget] if not out else sequence.token_ids
        if len(ids) > left:
            continue
        out.append(TokenSequence(prompt=sequence.prompt, token_ids=ids, num_prompt_tokens=len(ids)))
        left -= len(ids)
    return out


def _why_not(options: CompareOptions, inputs: Inputs) -> str | None:
    if options.control == "none":
        return "switched off (--control none)"
    if inputs.dtype == "float32":
        return "the comparison itself is in FP32"
    if options.mode == "compiled":
        return "the compiled engine shows no site to check"
    num_bytes = sum(p.numel() for p in inputs.trainer.model.parameters()) * 4
    free = _free_bytes(inputs.device)
    if free is not None and 2 * num_bytes + HEADROOM_BYTES > free:
        need = (2 * num_bytes + HEADROOM_BYTES) / 2**30
        return f"two FP32 copies need about {need:.1f} GiB and {free / 2**30:.1f} GiB are free"
    return None


def _free_bytes(device: str) -> int | None:
    """Memory free for the control, bytes; None where it cannot be told."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info()[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
