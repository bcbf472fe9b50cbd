"""The metrics that a gate may name, and their values in a run.

=================================== =======================================================================================
``k3_kl`` and every other number    over all tokens; ``prefill.``, ``decode.`` and ``rescored.k3_kl`` over those of one source
``verdict``                         the kind of the verdict, such as ``rounding only``
``first_divergent_site``            first site in execution order with an element that differs, or ``none``
``local_differing.REGION``          share of elements the region makes differ when fed the same input, its sites but the residual adds pooled
``max_local_differing.REGION``      the largest such share of a single site
``differing.REGION``                share of elements that differ end to end
``fp32_local_rel_l2.REGION``        largest local relative L2 of a site in the FP32 control
``floors.NAME.METRIC``              a noise floor: ``mean_abs_d``, ``max_abs_d``, ``k3_kl`` or ``exact_share``
``attribution.REGION.COLUMN``       a number of ``attribution.parquet``; REGION may be ``all`` (none aligned) or ``self``
``num_findings.SEVERITY``           findings of that severity
``faults``                          data faults that ``rpadiag rollouts`` recognised
=================================== =======================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rpadiag.errors import RpadiagError, unknown_name
from rpadiag.findings import SEVERITIES
from rpadiag.runs import Run
from rpadiag.runs.schema import SOURCES, table_named
from rpadiag.sites import REGIONS, RESIDUAL_ADDS, in_execution_order

if TYPE_CHECKING:
    import pyarrow as pa

SITE_METRICS = ("local_differing", "max_local_differing", "differing", "fp32_local_rel_l2")
FLOOR_METRICS = ("mean_abs_d", "max_abs_d", "k3_kl", "exact_share")
ATTRIBUTION_DESIGNS = {"all": ("all",), "self": ("self",)}  # region of a row -> its designs
PART_DESIGNS = ("each", "main")  # of every other region, the first that the run has
ATTRIBUTION_COLUMNS = tuple(c.name for c in table_named("attribution").columns if c.type in ("float64", "bool"))
TEXTS = ("verdict", "first_divergent_site")
NO_SITE = "none"

# Which commands write what a family of metrics is read from: a gate is for those runs and no others.
_COMMANDS = {
    "logprob": ("compare", "rollouts"),
    "sites": ("compare",),
    "floors": ("compare",),
    "attribution": ("bisect",),
    "faults": ("rollouts",),
    "run": ("compare", "bisect", "rollouts"),
}


class NotMeasured(RpadiagError):
    """A run has no number under a known name; the message says which and why."""


def is_text(metric: str) -> bool:
    """Whether the metric is a name rather than a number."""
    return metric in TEXTS


def known_metrics() -> list[str]:
    """Every metric a gate may name, with REGION, NAME, COLUMN and SEVERITY standing for the names listed elsewhere."""
    from rpadiag.compare.metrics import metric_names

    return [
        *TEXTS,
        *metric_names(),
        "prefill.METRIC",
        "decode.METRIC",
        "rescored.METRIC",
        *(f"{m}.REGION" for m in SITE_METRICS),
        "floors.NAME.METRIC",
        "attribution.REGION.COLUMN",
        "num_findings.SEVERITY",
        "faults",
    ]


def check_metric(metric: str) -> str:
    """The metric itself, or a usage error that lists the known ones."""
    parts = metric.split(".")
    head = parts[0]
    if metric in (*TEXTS, "faults"):
        return metric
    if (head in SOURCES and len(parts) == 2) or len(parts) == 1:
        from rpadiag.compare.metrics import metric_names

        if parts[-1] in metric_names():
            return metric
    elif head in SITE_METRICS and len(parts) == 2:
        return _known("region", parts[1], REGIONS, metric)
    elif head == "floors" and len(parts) == 3:
        return _known("floor metric", parts[2], FLOOR_METRICS, metric)
    elif head == "attribution" and len(parts) == 3:
        _known("region", parts[1], (*REGIONS, *ATTRIBUTION_DESIGNS), metric)
        return _known("attribution column", parts[2], ATTRIBUTION_COLUMNS, metric)
    elif head == "num_findings" and len(parts) == 2:
        return _known("severity", parts[1], SEVERITIES, metric)
    raise unknown_name("metric", metric, known_metrics())


def _known(kind: str, name: str, names: tuple[str, ...], metric: str) -> str:
    if name not in names:
        raise unknown_name(kind, name, names)
    return metric


def family_of(metric: str) -> str:
    """Which part of a run holds the metric: logprob, sites, floors, attribution, faults or run."""
    head = metric.split(".")[0]
    if head in SITE_METRICS or metric == "first_divergent_site":
        return "sites"
    if head in ("floors", "attribution", "faults"):
        return head
    return "run" if metric == "verdict" or head == "num_findings" else "logprob"


def commands_of(metric: str) -> tuple[str, ...]:
    """The commands whose runs can have the metric."""
    return _COMMANDS[family_of(metric)]


def measure(run: Run, metric: str) -> float | str:
    """Value of a known metric in a run. Raises NotMeasured where the run lacks it or it is not finite."""
    family, parts = family_of(metric), metric.split(".")
    if family == "sites":
        return _site_metric(run, parts)
    if family == "logprob":
        source = parts[0] if len(parts) == 2 else "all"
        found = ((run.metrics.get("logprob") or {}).get(source) or {}).get(parts[-1])
        return _number(run, metric, found)
    if family == "floors":
        return _floor(run, metric, parts)
    if family == "attribution":
        return _number(run, metric, attribution_row(run, parts[1]).get(parts[2]))
    if family == "faults":
        return _number(run, metric, (run.metrics.get("rollouts") or {}).get("num_faults"))
    if metric == "verdict":
        if run.verdict is None:
            raise NotMeasured(f"run {run.path} gives no verdict")
        return str(run.verdict["kind"])
    return float(sum(f["severity"] == parts[1] for f in run.findings))


def _number(run: Run, metric: str, found: Any) -> float:
    if not isinstance(found, int | float) or not math.isfinite(found):
        why = "it was not measured" if found is None else f"it is {found}"
        raise NotMeasured(f"run {run.path} has no finite {metric}: {why}")
    return float(found)


def _floor(run: Run, metric: str, parts: list[str]) -> float:
    floors: Mapping[str, Any] = {f["name"]: f for f in run.metrics.get("floors") or []}
    if parts[1] not in floors:
        have = ", ".join(floors) or "none"
        raise NotMeasured(f"run {run.path} has no noise floor {parts[1]}; its floors: {have}")
    return _number(run, metric, floors[parts[1]].get(parts[2]))


def attribution_row(run: Run, region: str) -> dict[str, Any]:
    """The row of one region of a bisection."""
    rows: list[dict[str, Any]] = run.table("attribution").to_pylist()
    for design in ATTRIBUTION_DESIGNS.get(region, PART_DESIGNS):
        for row in rows:
            if row["region"] == region and row["design"] == design:
                return row
    have = ", ".join(dict.fromkeys(str(r["region"]) for r in rows)) or "none"
    raise NotMeasured(f"run {run.path} has no attribution of {region}; its regions: {have}")


def local_shares(run: Run) -> dict[str, float]:
    """``local_differing`` of every region where it was measured, in one read."""
    import pyarrow.compute as pc

    rows = run.table("sites", ["precision", "region", "point", "local_n", "local_num_differing"])
    rows = without_adds(rows.filter(pc.equal(rows["precision"], "model")))
    sums = rows.group_by("region").aggregate([("local_n", "sum"), ("local_num_differing", "sum")]).to_pydict()
    found = zip(sums["region"], sums["local_n_sum"], sums["local_num_differing_sum"], strict=True)
    return {region: moved / n for region, n, moved in found if n}


def without_adds(rows: pa.Table) -> pa.Table:
    """Site rows without the residual adds, which do not speak for their region (:func:`rpadiag.sites.telling_points`)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return rows.filter(pc.invert(pc.is_in(rows["point"], pa.array(RESIDUAL_ADDS))))


def _site_metric(run: Run, parts: list[str]) -> float | str:
    import pyarrow.compute as pc

    head = parts[0]
    fp32 = head == "fp32_local_rel_l2"
    n, differing = ("n", "num_differing") if head in ("differing", "first_divergent_site") else ("local_n", "local_num_differing")  # fmt: skip
    columns = ["precision", "region", "point", "site", *(["local_rel_l2"] if fp32 else [n, differing])]
    rows = run.table("sites", columns)
    rows = rows.filter(pc.equal(rows["precision"], "fp32" if fp32 else "model"))
    if head == "first_divergent_site":
        return _first_divergent(run, rows)
    rows = rows.filter(pc.equal(rows["region"], parts[1]))
    if head == "local_differing":
        rows = without_adds(rows)
    if fp32:
        return _number(run, ".".join(parts), pc.max(rows["local_rel_l2"]).as_py())
    by_site = rows.group_by("site").aggregate([(n, "sum"), (differing, "sum")])
    counts, moved = by_site[f"{n}_sum"].to_numpy(), by_site[f"{differing}_sum"].to_numpy()
    measured = counts > 0  # NaN, where nothing was measured, is not
    if not measured.any():
        where = f"local divergence of {parts[1]}" if n == "local_n" else f"end-to-end divergence of {parts[1]}"
        raise NotMeasured(f"run {run.path} has no {'.'.join(parts)}: no {where} was measured")
    if head == "max_local_differing":
        return float((moved[measured] / counts[measured]).max())
    return float(moved[measured].sum() / counts[measured].sum())


def _first_divergent(run: Run, rows: pa.Table) -> str:
    by_site = rows.group_by("site").aggregate([("num_differing", "sum")]).to_pydict()
    if not by_site["site"]:
        raise NotMeasured(f"run {run.path} compared no site")
    moved = {s for s, k in zip(by_site["site"], by_site["num_differing_sum"], strict=True) if k}
    return next(iter(in_execution_order(moved)), NO_SITE)
