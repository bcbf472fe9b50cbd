"""How sure the difference of a metric between two runs is.

Both runs scored the same prompts, so the difference is paired: prompts are put into groups, one group after another is
left out of *both* runs, and the spread of the resulting differences is its standard error (delete-a-group jackknife).
Below 8 prompts blocks of 16 tokens stand in for prompts. Chaos that makes single logprobs jump from run to run is
in that spread. Where the runs measured noise floors, the floor over the root of the number of tokens is added in
quadrature: what another batch composition alone would do to the mean.

Largest and smallest values have no such error, and none is invented for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rpadiag.gates.measures import FLOOR_METRICS, attribution_row, family_of, without_adds
from rpadiag.runs import Run

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from rpadiag.compare.metric_sums import MetricSums

STANDARD_ERRORS = 2.0  # a gate on a difference fails beyond so many
NUM_GROUPS = 20
MIN_PROMPTS = 8
BLOCK = 16  # tokens
EXACT = ("num_tokens", "num_sequences", "num_nonfinite", "faults", "num_findings")
WITHOUT = (
    "max_abs_d", "log_ppl_diff_max", "log_ppl_diff_min", "rollout_is_min", "rollout_is_max", "rollout_probs_diff_max",
    "argmax_flips", "chi2_seq",
)  # fmt: skip


def margin_of(run: Run, baseline: Run, metric: str, factor: float) -> float | None:
    """How far beyond its bound metric(run) - factor * metric(baseline) may be: two standard errors; None: unknown."""
    name = metric.split(".")[-1]
    if metric.split(".")[0] in EXACT or name in EXACT:
        return 0.0
    family = family_of(metric)
    if family == "attribution":
        return _attribution(run, baseline, metric, factor)
    if family == "logprob" and name not in WITHOUT:
        return _logprob(run, baseline, metric, factor)
    if family == "sites" and name != "none" and metric.split(".")[0] in ("local_differing", "differing"):
        return _sites(run, baseline, metric, factor)
    return None


def jackknife(left_out: Sequence[float]) -> float:
    """Standard error from the estimates that each leave out one of G groups."""
    values = np.asarray(left_out, np.float64)
    g = len(values)
    return float(np.sqrt((g - 1) / g * np.sum((values - values.mean()) ** 2)))


def _attribution(run: Run, baseline: Run, metric: str, factor: float) -> float | None:
    _, region, column = metric.split(".")
    a, b = (attribution_row(r, region).get(f"{column}_se") for r in (run, baseline))
    return None if a is None or b is None else STANDARD_ERRORS * math.hypot(a, factor * b)


def _logprob(run: Run, baseline: Run, metric: str, factor: float) -> float | None:
    from rpadiag.compare.metrics import metrics_of

    source, name = metric.split(".") if "." in metric else ("all", metric)
    if not (run.has("tokens") and baseline.has("tokens")):
        return None
    ours, theirs = (_token_groups(r, source) for r in (run, baseline))
    if min(sum(g.num_tokens > 0 for g in side) for side in (ours, theirs)) < 2:
        return None
    a, b = ([metrics_of(s).get(name) for s in _each_left_out(side)] for side in (ours, theirs))
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    differences = [x - factor * y for x, y in pairs]
    if len(differences) < 2 or not np.isfinite(differences).all():
        return None
    return STANDARD_ERRORS * math.hypot(jackknife(differences), _floor_error(run, name), _floor_error(baseline, name))


def _floor_error(run: Run, name: str) -> float:
    floors = run.metrics.get("floors") or []
    if name not in FLOOR_METRICS or name in ("max_abs_d", "exact_share"):
        return 0.0
    known = [(float(f[name]), int(f["num_tokens"])) for f in floors if f.get(name) is not None and f.get("num_tokens")]
    return max((value / math.sqrt(n) for value, n in known), default=0.0)


def _token_groups(run: Run, source: str) -> list[MetricSums]:
    """Sums of the tokens of each group."""
    from rpadiag.compare.metric_sums import MetricSums

    columns = ["prompt", "position", "p", "q", "p_argmax", "q_argmax", *(["source"] if source != "all" else [])]
    rows = run.table("tokens", columns)
    if source != "all":
        import pyarrow.compute as pc

        rows = rows.filter(pc.equal(rows["source"], source))
    prompt = rows["prompt"].to_numpy()
    if len(np.unique(prompt)) >= MIN_PROMPTS:
        group = prompt % NUM_GROUPS
    else:
        group = (prompt * 7 + rows["position"].to_numpy() // BLOCK) % NUM_GROUPS
    p, q = _floats(rows, "p"), _floats(rows, "q")
    ours, theirs = _floats(rows, "p_argmax"), _floats(rows, "q_argmax")
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(NUM_GROUPS + 1))
    out = []
    for k in range(NUM_GROUPS):
        at = order[ends[k] : ends[k + 1]]
        out.append(MetricSums().add(p[at], q[at], sequence_ids=prompt[at], p_argmax=ours[at], q_argmax=theirs[at]))
    return out


def _floats(rows: pa.Table, column: str) -> NDArray[np.float64]:
    return np.asarray(rows[column].to_pandas().to_numpy(dtype=np.float64, na_value=np.nan))


def _each_left_out(groups: Sequence[MetricSums]) -> list[MetricSums]:
    """The sums of all groups but one, for each group that is not empty; from the left and the right, so that it takes 3 G additions."""
    from rpadiag.compare.metric_sums import MetricSums

    before, after = [MetricSums()], [MetricSums()]
    for g in groups:
        before.append(before[-1] + g)
    for g in reversed(groups):
        after.append(after[-1] + g)
    after.reverse()
    return [before[k] + after[k + 1] for k, g in enumerate(groups) if g.num_tokens]


def _sites(run: Run, baseline: Run, metric: str, factor: float) -> float | None:
    head, region = metric.split(".")
    a, b = (_prompt_counts(r, head, region) for r in (run, baseline))
    prompts = sorted(set(a) & set(b))
    if len(prompts) < 2:
        return None
    differences = []
    for left_out in prompts:
        shares = []
        for side in (a, b):
            n = sum(side[p][0] for p in prompts if p != left_out)
            shares.append(sum(side[p][1] for p in prompts if p != left_out) / n if n else math.nan)
        differences.append(shares[0] - factor * shares[1])
    return STANDARD_ERRORS * jackknife(differences) if np.isfinite(differences).all() else None


def _prompt_counts(run: Run, head: str, region: str) -> dict[int, tuple[int, int]]:
    """Prompt -> (elements compared, elements that differ)."""
    import pyarrow.compute as pc

    prefix = "local_" if head == "local_differing" else ""
    n, k = f"{prefix}n", f"{prefix}num_differing"
    rows = run.table("sites", ["prompt", "precision", "region", "point", n, k])
    rows = rows.filter(pc.and_(pc.equal(rows["precision"], "model"), pc.equal(rows["region"], region)))
    rows = without_adds(rows) if prefix else rows
    sums = rows.group_by("prompt").aggregate([(n, "sum"), (k, "sum")]).to_pydict()
    return {p: (x or 0, y or 0) for p, x, y in zip(sums["prompt"], sums[f"{n}_sum"], sums[f"{k}_sum"], strict=True)}
