"""The table of steps: one row a round of one run, as Parquet. Schema version, provenance and regime are in the file's metadata.

A *round* is one generation and the updates made of it: what other places call a step of GRPO.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 2
KEY = b"rpadiag_rl"

# name -> (type, what it is with its unit)
COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "model": (pa.string(), "name of the checkpoint"),
    "arm": (pa.string(), "name of the arm"),
    "seed": (pa.int32(), "of data order and sampling"),
    "engine": (pa.string(), "mode of vLLM: eager or compiled"),
    "preset": (pa.string(), "regime"),
    "learning_rate": (pa.float64(), "of AdamW, constant"),
    "round": (pa.int32(), "from 0; what is measured before its first update"),
    "updates": (pa.int32(), "optimizer steps made before this round"),
    "reward": (pa.float64(), "mean over the completions of the round: share of right answers"),
    "reward_std": (pa.float64(), "standard deviation over completions"),
    "zero_std_share": (pa.float64(), "share of prompts whose completions all have the same reward: no gradient"),
    "num_tokens": (pa.int64(), "sampled tokens"),
    "completion_length": (pa.float64(), "mean, tokens"),
    "truncated_share": (pa.float64(), "completions that did not end"),
    "entropy": (pa.float64(), "of the trainer's distribution, mean over tokens and updates, nats"),
    "mean_abs_d": (pa.float64(), "mean |d|, d = trainer - rollout log-probability of the sampled tokens, nats"),
    "max_abs_d": (pa.float64(), "largest |d|, nats"),
    "kl": (pa.float64(), "mean of -d, nats"),
    "k3_kl": (pa.float64(), "mean of exp(d) - 1 - d, nats"),
    "chi2_token": (pa.float64(), "mean of exp(2 d) - 1"),
    "chi2_seq": (pa.float64(), "mean over sequences of exp(2 sum d) - 1"),
    "ess": (pa.float64(), "effective sample size of the ratios exp(d), a share"),
    "ratio_min": (pa.float64(), "smallest raw ratio exp(d)"),
    "ratio_max": (pa.float64(), "largest raw ratio exp(d)"),
    "outside_ratio_share": (pa.float64(), "tokens with a ratio outside [0.8, 1.2]"),
    "num_nonfinite": (pa.int64(), "tokens without a finite log-probability"),
    "loss": (pa.float64(), "mean over the round's updates"),
    "grad_norm": (pa.float64(), "before clipping, mean over the round's updates with a finite one; null where none was"),
    "grad_norm_max": (pa.float64(), "the largest of them"),
    "clip_share": (pa.float64(), "tokens clipped by PPO's clip, mean over updates"),
    "skipped_updates": (pa.int32(), "updates skipped so far because a gradient was not finite"),
    "loss_scale": (pa.float64(), "of FP16; null elsewhere"),
    "seconds_generate": (pa.float64(), "in vLLM"),
    "seconds_sync": (pa.float64(), "weights into vLLM"),
    "seconds_train": (pa.float64(), "all else of the round but measuring: scoring, loss, gradients, optimizer"),
    "seconds_measure": (pa.float64(), "in this table's own measurements"),
    "systematic_sq": (pa.float64(), "unbiased E[b^2] of trainer against rollout engine over replicates, nats^2; null between"),
    "systematic_sq_se": (pa.float64(), "its standard error over sequences"),
    "mean_shift": (pa.float64(), "E[b], nats"),
    "mean_shift_se": (pa.float64(), "its standard error over sequences"),
    "chaotic_sq": (pa.float64(), "variance of d over replicates, mean over tokens, nats^2"),
    "prefill_k3_kl": (pa.float64(), "k3 of the same tokens against the engine's prefill, mean over replicates, nats"),
    "weights_equal": (pa.bool_(), "every weight that vLLM lets one read has the trainer's bits"),
}  # fmt: skip
SCHEMA = pa.schema([pa.field(name, kind, metadata={"description": text}) for name, (kind, text) in COLUMNS.items()])


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Replace ``path`` whole. about: provenance by run, JSON."""
    unknown = {name for row in rows for name in row} - set(COLUMNS)
    if unknown:
        raise ValueError(f"no such columns: {sorted(unknown)}")
    text = json.dumps({"schema_version": SCHEMA_VERSION, **about}, sort_keys=True).encode()
    columns = {name: [row.get(name) for row in rows] for name in COLUMNS}
    table = pa.table(columns, schema=SCHEMA.with_metadata({KEY: text}))
    part = path.with_name(f".{path.name}.part")
    pq.write_table(table, part, compression="zstd")
    os.replace(part, path)


def read_table(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows, and what was said about them. Raises ValueError for what is no such file, or has another schema version or other columns."""
    try:
        table = pq.ParquetFile(path).read()
        about = json.loads((table.schema.metadata or {}).get(KEY, b"{}"))
    except (OSError, pa.ArrowException, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if about.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema version {about.get('schema_version')}, expected {SCHEMA_VERSION}")
    if table.column_names != list(COLUMNS):
        differ = sorted(set(table.column_names) ^ set(COLUMNS))
        raise ValueError(
            f"{path} has other columns than schema version {SCHEMA_VERSION}: {', '.join(differ) or 'their order'}"
        )
    return table.to_pylist(), about
