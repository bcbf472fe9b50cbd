"""The functions of the package: documented, typed after their options, lazy, and every block of docs/python-api.md works."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.rollouts.recorded import record, rows, write

import rpadiag
from rpadiag.cli.app import app
from rpadiag.errors import UsageError
from rpadiag.workflows import options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
CLASSES = {
    "compare": options.CompareOptions,
    "compare_bundles": options.BundlesOptions,
    "bisect": options.BisectOptions,
    "capture": options.CaptureOptions,
    "fingerprint": options.FingerprintOptions,
}


def test_every_block_of_the_page_works_one_after_another(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from tiny import PROMPTS

    (tmp_path / "checkpoint").symlink_to(tiny("qwen3"))
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    (tmp_path / "bundles").mkdir()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint('html', len(run._repr_html_()), run.metrics_frame().shape)"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rounding only" in done.stdout and "html" in done.stdout
    assert (tmp_path / "report.html").exists()


def test_importing_the_package_and_naming_its_functions_imports_nothing_heavy() -> None:
    code = (
        "import sys, rpadiag; [getattr(rpadiag, n) for n in rpadiag.__all__ if n != 'align']; rpadiag.compare.metrics;"
        "print([m for m in ('torch', 'transformers', 'pandas', 'vllm', 'plotly') if m in sys.modules])"
    )
    code = code.replace("rpadiag.compare.metrics;", "import rpadiag.compare.causes as causes;")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", CLASSES)
def test_function_has_the_arguments_of_its_options_and_their_words(name: str) -> None:
    function = getattr(rpadiag, name)
    fields = {f.name for f in dataclasses.fields(CLASSES[name])}
    assert set(inspect.signature(function).parameters) == fields
    documented = inspect.getdoc(getattr(rpadiag.api, name)) or ""
    assert documented.splitlines()[0].endswith(".")
    assert inspect.cleandoc(CLASSES[name].__doc__ or "") in documented


def test_every_command_has_its_function() -> None:
    without = {"demo", "doctor"}  # a show, and a look at the machine
    commands = {command.name for command in app.registered_commands} - without
    assert commands <= set(rpadiag.__all__)


@pytest.mark.parametrize("name", ["compare", "rollouts"])
def test_subpackage_of_a_commands_name_is_both(name: str) -> None:
    from rpadiag.rollouts import schemas

    assert callable(getattr(rpadiag, name))
    assert rpadiag.rollouts.schemas is schemas


def test_rollouts_in_memory_and_in_a_file_are_the_same(tmp_path: Path) -> None:
    recorded = rows(record(num_sequences=10, num_tokens=30), "trl")
    path = write(tmp_path / "r.jsonl", recorded)
    held, read = rpadiag.rollouts(records=recorded), rpadiag.rollouts(path, run=tmp_path / "run")
    assert dict(held.metrics) == dict(read.metrics) and held.schema == read.schema == "trl"
    assert rpadiag.open_run(tmp_path / "run").metrics_frame().loc["k3_kl", "all"] == held.metrics["k3_kl"]


def test_records_that_are_not_alike_are_an_input_error() -> None:
    recorded = rows(record(num_sequences=3, num_tokens=10), "rpadiag")
    del recorded[2]["rollout_logprobs"]
    with pytest.raises(rpadiag.errors.InputError, match="not like the first one"):
        rpadiag.rollouts(records=recorded)


def test_rollouts_want_files_or_records() -> None:
    for arguments in ({}, {"files": "a.jsonl", "records": [{}]}, {"files": "a.jsonl", "temperature": 0.7}):
        with pytest.raises(UsageError):
            rpadiag.rollouts(**arguments)


def test_gate_answers_with_a_status_and_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows(record(num_sequences=10, num_tokens=30), "rpadiag"))
    rpadiag.rollouts(path, run=tmp_path / "run")
    found = rpadiag.gate(tmp_path / "run", "k3_kl<=1e-9", "faults==0")
    assert [g.status for g in found.gates] == ["fail", "pass"] and "k3_kl is" in found.gates[0].text
    with pytest.raises(UsageError, match="no gate"):
        rpadiag.gate(tmp_path / "run")


def test_notebook_page_escapes_what_a_run_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows(record(num_sequences=10, num_tokens=30), "rpadiag"))
    rpadiag.rollouts(path, run=tmp_path / "run")
    findings = tmp_path / "run" / "findings.json"
    changed = json.loads(findings.read_text())
    changed["findings"][0]["text"] = "<script>alert(1)</script>"
    findings.write_text(json.dumps(changed))
    page = rpadiag.open_run(tmp_path / "run")._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page
