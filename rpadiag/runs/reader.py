"""Reading a run directory: only complete ones, checked against the schema before anything is believed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpadiag.errors import InputError, NotComparableError
from rpadiag.findings import most_important_first
from rpadiag.runs import shapes
from rpadiag.runs.manifest import differing_tensors, token_digest
from rpadiag.runs.schema import FORMAT_NAME, FORMAT_VERSION, Table, table_named
from rpadiag.runs.shapes import DAMAGED, check_shape
from rpadiag.runs.writer import FINDINGS, MANIFEST, METRICS, WEIGHTS
from rpadiag.sites import POINTS

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


FINGERPRINT = "fingerprint.json"  # added to a run by `rpadiag fingerprint`
NO_SHAPE: Mapping[str, Sequence[str]] = {}
_NAME_A_RUN = "name a directory that a rpadiag command wrote with --run"


def _load(path: Path) -> Any:
    """JSON of one file of a run; missing or broken files are an InputError that names the file."""
    try:
        written = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", hint=DAMAGED) from error
    try:
        return json.loads(written.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise InputError(f"{path} is not valid JSON", detail=str(error), hint=DAMAGED) from error


def _load_object(path: Path, *entries: str, shape: Mapping[str, Sequence[str]] = NO_SHAPE) -> dict[str, Any]:
    """As :func:`_load`, of a file that holds an object with these entries, of this shape."""
    data = _load(path)
    lacking = [name for name in entries if not isinstance(data, dict) or name not in data]
    if not isinstance(data, dict) or lacking:
        what = f"it has no {lacking[0]}" if lacking else "it holds no JSON object"
        raise InputError(f"{path} is not what rpadiag wrote", detail=what, hint=DAMAGED)
    check_shape(path, data, shape)
    return data


def status_of(path: Path) -> str | None:
    """Status that the manifest in ``path`` states; None if there is no readable manifest."""
    try:
        data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        return str(data["status"]) if data["format"] == FORMAT_NAME else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Run:
    """A complete run. Tables are read when asked for, whole or a few columns."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The verdict as written by the command, or None where the command gives none."""
        found = _load_object(self.path / FINDINGS, "verdict", "findings", shape=shapes.FINDINGS)["verdict"]
        return dict(found) if found else None

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Findings, most important first."""
        found = _load_object(self.path / FINDINGS, "verdict", "findings", shape=shapes.FINDINGS)["findings"]
        return most_important_first(found)

    @property
    def metrics(self) -> dict[str, Any]:
        """Contents of ``metrics.json``; null stands for a value that is not a finite number."""
        return _load_object(self.path / METRICS, shape=shapes.METRICS)

    @property
    def weights(self) -> dict[str, dict[str, str]]:
        """Tensor digests by stack and tensor name; empty where the command loaded no weights."""
        return _load_object(self.path / WEIGHTS) if self.manifest.get("weights") else {}

    @property
    def fingerprint(self) -> dict[str, Any] | None:
        """What ``rpadiag fingerprint`` found of this run, or None where it was not asked."""
        return (
            _load_object(self.path / FINGERPRINT, shape=shapes.FINGERPRINT)
            if (self.path / FINGERPRINT).exists()
            else None
        )

    def has(self, table: str) -> bool:
        """Whether the run wrote this table."""
        return table_named(table).name in self.manifest["tables"]

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A table as Arrow; one that the command did not write is empty, with its columns.

        Nullable columns that an earlier version of this format did not have yet are null.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        from rpadiag.runs.parts import files_of

        table = table_named(name)
        if not self.has(name):
            empty = table.arrow().empty_table()
            return empty.select(list(columns)) if columns is not None else empty
        path = self.path / table.file
        try:
            files = files_of(path)
            present = pq.read_schema(files[0]).names
            names = table.column_names if columns is None else columns
            read = [n for n in names if n in present] or present[:1]  # tables joined without a column have no rows
            found = pa.concat_tables([pq.read_table(f, columns=read) for f in files])
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"cannot read {path}", detail=str(error), hint=DAMAGED) from error
        if found.num_rows != self.manifest["tables"][name]:
            raise InputError(
                f"{path} has {found.num_rows} rows",
                detail=f"the manifest says {self.manifest['tables'][name]}",
                hint="the run was changed after it was written; make it again",
            )
        found = _with_nulls(table, found, names)
        _check_columns(path, table, found, columns)
        if name == "sites" and "point" in found.column_names:
            _check_points(path, found)
        if name == "effects" and columns is None:
            _check_parts(path, found, self.table("attribution", ["region", "design", "kind"]))
        return found

    def frame(self, name: str, columns: Sequence[str] | None = None, *, categories: Sequence[str] = ()) -> pd.DataFrame:
        """A table as pandas; nullable integer columns come as Int32 or Int64, so null stays null.

        categories: text columns with few values, which then cost a byte or two a row.
        """
        return _to_pandas(table_named(name), self.table(name, columns), categories)

    def prompts(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        return self.frame("prompts", columns)

    def tokens(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        return self.frame("tokens", columns)

    def sites(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        return self.frame("sites", columns)

    def attribution(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        return self.frame("attribution", columns)


def _with_nulls(table: Table, found: pa.Table, names: Sequence[str]) -> pa.Table:
    """The table in the order of ``names``, with nulls for the nullable ones it lacks: adding one does not raise the format version."""
    import pyarrow as pa

    types = table.arrow()
    nullable = {c.name for c in table.columns if c.nullable}
    for name in names:
        if name not in found.column_names and name in nullable:
            found = found.append_column(types.field(name), pa.nulls(found.num_rows, types.field(name).type))
    return found.select([n for n in names if n in found.column_names])


def _check_columns(path: Path, table: Table, found: pa.Table, columns: Sequence[str] | None) -> None:
    expected = table.arrow()
    for name in columns if columns is not None else table.column_names:
        if name not in found.column_names or found.schema.field(name).type != expected.field(name).type:
            have = found.schema.field(name).type if name in found.column_names else "absent"
            raise InputError(
                f"{path}: column {name} is {have}, expected {expected.field(name).type}",
                hint="the file was not written by this version of rpadiag; make the run again",
            )


def _check_points(path: Path, sites: pa.Table) -> None:
    """InputError for a point that is not in the vocabulary of this version."""
    import pyarrow.compute as pc

    unknown = [str(p) for p in pc.unique(sites["point"]).to_pylist() if p not in POINTS]
    if unknown:
        raise InputError(
            f"{path} has rows of the point {unknown[0]}, which this version of rpadiag does not know",
            hint="read it with the version that wrote it, or make the run again",
        )


def _check_parts(path: Path, effects: pa.Table, attribution: pa.Table) -> None:
    """InputError unless every part that was attributed, and all together, has a row of every metric."""
    parts = [r["region"] for r in attribution.to_pylist() if r["design"] == "each" and r["kind"] == "ulp"]
    have = set(zip(effects["region"].to_pylist(), effects["metric"].to_pylist(), strict=True))
    metrics = dict.fromkeys(effects["metric"].to_pylist())
    lacking = [(part, metric) for part in (*parts, "all") for metric in metrics if (part, metric) not in have]
    if lacking and parts:
        raise InputError(f"{path} has no {lacking[0][1]} of {lacking[0][0]}", hint=DAMAGED)


def _to_pandas(table: Table, found: pa.Table, categories: Sequence[str] = ()) -> pd.DataFrame:
    import pandas as pd

    frame = found.to_pandas(categories=list(categories))
    for column in table.columns:
        if column.nullable and column.type in ("int32", "int64") and column.name in found.column_names:
            dtype: Any = pd.Int32Dtype() if column.type == "int32" else pd.Int64Dtype()
            frame[column.name] = found.column(column.name).to_pandas(types_mapper=lambda _, d=dtype: d)
    return frame


def _runs_in(where: Path, most: int = 5) -> str:
    """Hint that names the directories in ``where`` that look like runs; empty where none does."""
    names = [p.parent.name for p in sorted(where.glob(f"*/{MANIFEST}"))]
    return f"it holds {', '.join(names[:most])}{' and others' if len(names) > most else ''}: name one" if names else ""


def open_run(path: str | Path) -> Run:
    """Open a complete run. Raises InputError for a missing directory, a run that did not finish, or another format."""
    where = Path(path)
    if not where.is_dir():
        raise InputError(f"run {where} does not exist", hint=_NAME_A_RUN)
    if not (where / MANIFEST).exists():
        raise InputError(f"{where} is not a run", detail=f"it has no {MANIFEST}", hint=_runs_in(where) or _NAME_A_RUN)
    manifest = _load(where / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_NAME:
        raise InputError(f"{where} is not a run", detail=f"its {MANIFEST} is of another kind", hint=_NAME_A_RUN)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise InputError(
            f"run {where} has format version {version}; this rpadiag reads {FORMAT_VERSION}",
            hint="make the run again with this version, or read it with the version that wrote it",
        )
    status = manifest.get("status")
    if status != "complete":
        raise InputError(
            f"run {where} is not complete: its status is {status}", detail=_why(manifest), hint="make the run again"
        )
    if "tables" not in manifest or "command" not in manifest:
        lacking = "tables" if "tables" not in manifest else "command"
        raise InputError(f"{where / MANIFEST} is not what rpadiag wrote", detail=f"it has no {lacking}", hint=DAMAGED)
    check_shape(where / MANIFEST, manifest, shapes.MANIFEST)
    return Run(where, manifest)


def _why(manifest: Mapping[str, Any]) -> str:
    if manifest.get("status") == "started":
        return f"started {manifest.get('started_utc')}; it is still running, or its process was killed"
    error = manifest.get("error") or {}
    return f"ended {manifest.get('ended_utc')} with {error.get('type')}: {error.get('message')}"


def check_same_inputs(run_a: Run, run_b: Run, *, prompts_only: bool = False) -> tuple[str, ...]:
    """Raise NotComparableError unless both runs scored the same tokens with the same weights.

    prompts_only: tokens that the rollout generated after a prompt do not count, as between a comparison, which scores
    them too, and a bisection, which generates none. Returns what could not be checked, in words (a run without a model records no weight digests).
    """
    _check_tokens(run_a, run_b, prompts_only=prompts_only)
    unchecked: list[str] = []
    weights_a, weights_b = (run.manifest.get("weights") or {} for run in (run_a, run_b))
    for stack in sorted(set(weights_a) | set(weights_b)):
        if stack not in weights_a or stack not in weights_b:
            lacking = run_b if stack in weights_a else run_a
            unchecked.append(f"{stack} weights: {lacking.path} records no digest")
        elif weights_a[stack]["digest"] != weights_b[stack]["digest"]:
            raise _different_weights(stack, run_a, run_b)
    if not weights_a and not weights_b:
        unchecked.append("weights: neither run records a digest")
    return tuple(unchecked)


def _scored(run: Run, *, prompts_only: bool) -> dict[int, tuple[int, str]]:
    """Prompt -> (number of tokens, their digest)."""
    if prompts_only:
        rows = run.table("prompts", ["prompt", "num_prompt_tokens", "token_ids"]).to_pylist()
        return {r["prompt"]: (n, token_digest(r["token_ids"][:n])) for r in rows for n in [r["num_prompt_tokens"]]}
    rows = run.table("prompts", ["prompt", "num_tokens", "token_digest"]).to_pylist()
    return {r["prompt"]: (r["num_tokens"], r["token_digest"]) for r in rows}


def _check_tokens(run_a: Run, run_b: Run, *, prompts_only: bool) -> None:
    a, b = (_scored(run, prompts_only=prompts_only) for run in (run_a, run_b))
    for prompt in sorted(set(a) | set(b)):
        if a.get(prompt) != b.get(prompt):
            raise NotComparableError(
                f"runs {run_a.path} and {run_b.path} are not comparable: prompt {prompt} has different tokens",
                detail="\n".join(_side(r.path, s.get(prompt), len(s)) for r, s in ((run_a, a), (run_b, b))),
                hint="make both runs from the same prompt file with the same tokenizer, --max-tokens and --seed",
            )


def _side(path: Path, found: tuple[int, str] | None, num_prompts: int) -> str:
    if found is None:
        return f"{path}: absent ({num_prompts} prompts)"
    return f"{path}: {found[0]} tokens, digest {found[1]} ({num_prompts} prompts)"


def _different_weights(stack: str, run_a: Run, run_b: Run) -> NotComparableError:
    a, b = run_a.weights.get(stack, {}), run_b.weights.get(stack, {})
    names = differing_tensors(a, b)
    lines = [
        f"{run.path}: {len(tensors)} tensors, digest {run.manifest['weights'][stack]['digest']}"
        for run, tensors in ((run_a, a), (run_b, b))
    ]
    if names:
        first = names[0]
        both = f"{a.get(first, 'absent')} and {b.get(first, 'absent')}"
        lines.append(f"{len(names)} tensors differ, first {first}: {both}")
    return NotComparableError(
        f"runs {run_a.path} and {run_b.path} are not comparable: the {stack} ran with different weights",
        detail="\n".join(lines),
        hint="make both runs from the same checkpoint, revision and --dtype",
    )
