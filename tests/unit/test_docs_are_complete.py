"""docs/metrics.md and docs/causes.md know every number that a run holds and every code that a finding can have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rpadiag.attribution import effects
from rpadiag.compare.metrics import metric_names
from rpadiag.gates.measures import FLOOR_METRICS, SITE_METRICS
from rpadiag.rollouts.fault import KINDS
from rpadiag.runs.schema import TABLES

ROOT = Path(__file__).parents[2]
MAKERS = ("Finding", "Explanation", "fault", "Fault")
NUMBERS = ("int64", "float64", "list<int64>", "bool")
COUNTS = ("more_replicates", "naive_rank", "num_replicates", "num_tokens", "num_sequences")


def named_in(page: str) -> set[str]:
    return set(re.findall(r"`([^`\s]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))


def emitted() -> dict[str, str]:
    """Code -> module, of every finding and explanation that the source makes."""
    found: dict[str, str] = dict.fromkeys(KINDS, "rollouts/fault.py")
    for path in sorted((ROOT / "rpadiag").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for code in codes_of(tree):
            found.setdefault(code, str(path.relative_to(ROOT / "rpadiag")))
    return found


def codes_of(tree: ast.Module) -> Iterator[str]:
    """Literal codes of calls; of a name, whatever the module assigns to it; of a pattern, what its names may be."""
    constants = assigned(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in MAKERS:
            continue
        code = next((k.value for k in node.keywords if k.arg == "code"), node.args[0] if node.args else None)
        if isinstance(code, ast.Constant):
            yield str(code.value)
        elif isinstance(code, ast.Name):
            yield from constants.get(code.id, ())
        elif isinstance(code, ast.JoinedStr):
            yield from {"attention-": ("attention-scale", "attention-cap"), "-gain": ("row-gain", "column-gain")}[
                next(str(v.value) for v in code.values if isinstance(v, ast.Constant))
            ]


def assigned(tree: ast.Module) -> dict[str, list[str]]:
    """Name -> every text that an assignment anywhere in the module may give it."""
    out: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            targets, values = [node.targets[0]], [node.value]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = list(node.targets[0].elts), list(node.value.elts)
            for target, value in zip(targets, values, strict=False):  # starred ones do not pair up
                if isinstance(target, ast.Name):
                    parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                    texts = [str(p.value) for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
                    out.setdefault(target.id, []).extend(texts)
    return out


def test_codes_are_found_in_every_way_that_they_are_written() -> None:
    codes = emitted()
    for code in ("local-divergence", "quantised-kv-cache", "not-determined", "non-finite-rows", "attention-cap", "prefix-cache", "self-control"):  # fmt: skip
        assert code in codes
    assert len(codes) > 100


def test_every_code_of_a_finding_is_in_the_guide_to_causes() -> None:
    missing = {code: module for code, module in emitted().items() if code not in named_in("causes.md")}
    assert missing == {}


def test_guide_names_no_code_that_nothing_emits() -> None:
    codes = set(emitted())
    kebab = {name for name in named_in("causes.md") if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)}
    assert kebab - codes == set()


def test_every_metric_of_a_run_is_explained() -> None:
    named = named_in("metrics.md")
    lacking = [m for m in (*metric_names(), *effects.METRICS, *FLOOR_METRICS) if m not in named]
    lacking += [m for m in SITE_METRICS if not any(n.startswith(m) for n in named)]
    assert lacking == []


def test_every_number_of_the_tables_of_sites_and_parts_is_explained() -> None:
    named = named_in("metrics.md")
    for table in ("sites", "attribution", "effects"):
        numbers = [c.name for c in TABLES[table].columns if c.type in NUMBERS and c.name not in COUNTS]
        assert [c for c in numbers if c not in named] == []


def test_readme_leads_to_the_guides() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in ("reading-a-report.md", "metrics.md", "causes.md"):
        assert f"docs/{page}" in readme
