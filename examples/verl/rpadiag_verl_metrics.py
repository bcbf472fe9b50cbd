"""verl: measure every batch and write runs. Name this module in ``VERL_USE_EXTERNAL_MODULES``, and make verl keep both log-probabilities
with ``actor_rollout_ref.rollout.calculate_log_probs=True``.

verl imports the module at the end of ``import verl``. Its trainer calls ``calculate_debug_metrics`` once a step, with the whole batch, and logs what comes back:
here that is verl's own metrics and ``rpadiag/...``. With ``RPADIAG_RUNS`` every ``RPADIAG_EVERY``-th call (default 10) writes a run there.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.debug import metrics as verl_metrics

import rpadiag
from rpadiag.errors import RpadiagError

COLUMNS = (
    "prompts",
    "responses",
    "attention_mask",
    "response_mask",
    "position_ids",
    "rollout_log_probs",
    "old_log_probs",
)
LOGGED = ("mean_abs_d", "k3_kl", "chi2_token", "chi2_seq", "rollout_is_eff_sample_size", "outside_ratio_share")
RUNS = os.environ.get("RPADIAG_RUNS")
EVERY = int(os.environ.get("RPADIAG_EVERY", "10"))

_calculate_debug_metrics = verl_metrics.calculate_debug_metrics
_calls = itertools.count()
log = logging.getLogger(__name__)


def records_of(batch: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """(records, schema) of a batch of verl's tensors [B, T]. Where it has no prompts, as in verl's v1 trainer, the responses alone."""
    columns = {name: batch[name].cpu().tolist() for name in COLUMNS if name in list(batch.keys())}
    if "prompts" in columns:
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], "verl"
    names = {
        "responses": "token_ids",
        "response_mask": "mask",
        "rollout_log_probs": "rollout_logprobs",
        "old_log_probs": "trainer_logprobs",
    }
    rows = zip(*(columns[name] for name in names), strict=True)
    return [dict(zip(names.values(), row, strict=True)) for row in rows], "rpadiag"


def measured(data: Any) -> dict[str, float]:
    """verl's metrics and rpadiag's of the same batch; of a batch with a fault only the number of faults."""
    found = dict(_calculate_debug_metrics(data))
    number = next(_calls)
    run = None
    if RUNS and number % EVERY == 0:
        Path(RUNS).mkdir(parents=True, exist_ok=True)
        run = Path(RUNS) / f"batch-{number:06d}"
    try:
        records, schema = records_of(data.batch)
        result = rpadiag.rollouts(records=records, schema=schema, run=run)
    except RpadiagError as error:  # no reason to lose a training run
        log.warning("rpadiag could not measure batch %d: %s", number, error)
        return found
    found["rpadiag/num_faults"] = float(len(result.faults))
    for fault in (f for f in result.findings if f.code in result.faults):
        log.warning("%s", fault.text)
    if result.metrics and not result.faults:
        found |= {f"rpadiag/{name}": float(result.metrics[name]) for name in LOGGED}
    return found


verl_metrics.calculate_debug_metrics = measured
