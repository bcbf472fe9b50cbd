"""How lightly the command line starts: without the packages that cost seconds (tests/benchmarks/bench_startup.py times it)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "pandas",
    "numpy",
    "numba",
    "pyarrow",
    "plotly",
    "jinja2",
    "rich",
    "polars",
    "pydantic",
)


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import rpadiag",
        "import rpadiag.cli.app",
        "from rpadiag.cli.app import run; run(['--help'])",
        "from rpadiag.cli.app import run; run(['compare', '--help'])",
        "from rpadiag.cli.app import run; run(['compare', 'm', 'p.txt', '--run', 'r', '--dtype', 'x'])",
    ],
)
def test_command_line_starts_without_heavy_packages(statement: str) -> None:
    assert loaded_after(statement) & set(HEAVY) == set()


@pytest.mark.parametrize(
    "module",
    [
        "rpadiag.errors", "rpadiag.sites", "rpadiag.findings", "rpadiag.contracts", "rpadiag.prompts",
        "rpadiag.runs", "rpadiag.reports", "rpadiag.reports.html", "rpadiag.workflows.options",
        "rpadiag.workflows.doctor", "rpadiag.workflows.smollm2", "rpadiag.workflows.demo",
        "rpadiag.gates", "rpadiag.rollouts.faults", "rpadiag.workflows.rollouts", "rpadiag.reports.junit", "rpadiag.reports.trend",
    ],
)  # fmt: skip
def test_module_that_reads_runs_imports_no_engine(module: str) -> None:
    assert loaded_after(f"import {module}") & {"torch", "vllm", "transformers", "triton"} == set()
