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
from typing import Any

import numpy as np
import pytest
from unit.reports.written_runs import write_compare
from unit.rollouts.recorded import record, rows, write

import rpadiag
from rpadiag.cli.app import app
from rpadiag.errors import RpadiagError, UsageError
from rpadiag.workflows import options
from rpadiag.workflows.arguments import of_types
from rpadiag.workflows.options import CompareOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
RECORD = {"token_ids": [5, 6, 7], "rollout_logprobs": [-1.0, -2.0, -1.5], "trainer_logprobs": [-1.01, -2.02, -1.49]}
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": 3}, "model is 3, of type int"),
        ({"prompts": None}, "prompts is None"),
        ({"run": 3}, "run is 3"),
        ({"max_tokens": "5"}, "max_tokens is '5', of type str"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"sites": [3]}, "sites is [3]"),
        ({"sites": 3}, "sites is 3"),
        ({"trust_remote_code": "no"}, "trust_remote_code is 'no'"),
        ({"align": "rope,ropes"}, "unknown region: ropes"),
    ],
)
def test_argument_of_another_kind_is_refused_by_its_name_before_a_run_is_made(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    arguments = {"model": "checkpoint", "prompts": "p.txt", "run": str(tmp_path / "run"), **given}
    with pytest.raises(UsageError) as caught:
        rpadiag.compare(**arguments)
    assert told in caught.value.message and caught.value.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda run: rpadiag.gate(run, 3),
        lambda run: rpadiag.gate(run, ["k3_kl<=1"]),
        lambda run: rpadiag.gate(3, "k3_kl<=1"),
        lambda run: rpadiag.gate(run, policy=3),
        lambda run: rpadiag.report(run, gates=3),
        lambda run: rpadiag.report(run, gates="k3_kl<=1", history=run),
        lambda run: rpadiag.report(run),
        lambda run: rpadiag.report(run, html=3),
        lambda run: rpadiag.open_run(None),
        lambda run: rpadiag.rollouts(3),
        lambda run: rpadiag.rollouts(records=[{"token_ids": [1]}], temperature=1.0),
        lambda run: rpadiag.rollouts(records={"token_ids": [1]}),
        lambda run: rpadiag.rollouts(records=[RECORD, None]),
        lambda run: rpadiag.align(3),
    ],
)
def test_wrong_arguments_are_expected_errors_with_a_hint(tmp_path: Path, call: Callable[[Path], object]) -> None:
    with pytest.raises(RpadiagError) as caught:
        call(write_compare(tmp_path / "run", num_layers=1, num_prompts=1))
    assert caught.value.hint


def test_records_may_be_arrays_tuples_or_made_one_by_one() -> None:
    arrays = {name: np.array(values) for name, values in RECORD.items()}
    tuples = {name: tuple(values) for name, values in RECORD.items()}
    for records in ([arrays], [tuples], (one for one in [RECORD])):
        assert rpadiag.rollouts(records=records).metrics["num_tokens"] == 3


def test_text_stands_for_a_list_as_on_the_command_line(tmp_path: Path) -> None:
    run = write_compare(tmp_path / "run", num_layers=1, num_prompts=1)
    judgement = rpadiag.report(run, junit=tmp_path / "g.xml", gates="k3_kl<=1")
    assert judgement is not None and judgement.summary() == "1 gate: all pass."
    assert of_types(CompareOptions, {"align": "all", "sites": "q_rope"}) == {
        "align": ("all",),  # resolved where the model is known
        "sites": ("q_rope",),
    }
