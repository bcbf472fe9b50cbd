"""The page as a file: what it holds, that nothing in it can act, that it appears whole or not at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.cli.app import run as main
from rpadiag.errors import InputError, NotComparableError, UsageError
from rpadiag.findings import NUM_FINDINGS, SEVERITIES, one_of_each_kind
from rpadiag.reports.html import script_json, write_report
from rpadiag.reports.sections import headline
from rpadiag.reports.view import spoken
from rpadiag.runs import create_run, open_run

HOSTILE = '</script><script>alert("prompt")</script> & <img src=x onerror=alert(1)>'


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_compare(tmp_path_factory.mktemp("runs") / "compare", prompt_text=HOSTILE, odd_word=HOSTILE)


@pytest.fixture(scope="module")
def bisect(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bisect(tmp_path_factory.mktemp("runs") / "bisect")


@pytest.fixture(scope="module")
def page(compare: Path, bisect: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report([compare, bisect], tmp_path_factory.mktemp("page") / "r.html").read_text(encoding="utf-8")


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def figures_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return dict(json.loads(found.group(1)))


def test_all_reduces_which_one_stack_lacks_are_shown_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_compare(tmp_path / "ranks", num_layers=2, reduced=True)
    assert main(["report", str(run), "--html", str(tmp_path / "a.html"), "--markdown", str(tmp_path / "a.md")]) == 0
    assert "layers.1.down_reduce" in (tmp_path / "a.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("o_reduce")]
    assert row == ["o_reduce", "all_reduce", "0", "%", "-", f"{2 * 3 * 48 * 576:,}"]


def test_page_is_under_eight_megabytes_with_plotly_once(page: str) -> None:
    assert len(page.encode()) < 8_000_000
    assert page.count("plotly.js v") == 1


def test_page_names_no_address_to_load_from(page: str) -> None:
    body = without_scripts(page)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:,)[^"']*""", body)
    assert "@import" not in body and "url(" not in body
    assert "default-src 'none'" in body


def test_text_of_prompts_and_tokens_is_escaped_everywhere(page: str) -> None:
    body = without_scripts(page)
    assert "<img" not in body
    assert "&lt;/script&gt;&lt;script&gt;alert(" in body
    assert page.count("</script>") == 3  # the page's own: figures, plotly, report


def test_labels_inside_plots_are_escaped_against_plotly_markup(page: str) -> None:
    figures = json.dumps(figures_of(page), ensure_ascii=False)
    assert "<img" not in figures
    assert "&lt;img src=x onerror=alert(1)&gt;" in figures


def test_json_in_a_script_element_holds_no_character_that_could_end_it() -> None:
    text = script_json({"a": "</script><!--&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--&\u2028"}


def test_verdict_badge_and_sentence_are_the_runs_own(page: str) -> None:
    body = without_scripts(page)
    assert 'class="verdict kind-rounding-only"' in body
    assert "Trainer and vLLM 0.32.0 compute the same function" in body


def test_comparison_and_bisection_share_one_section(page: str) -> None:
    assert page.count('<article class="section"') == 1
    for block in ("sites", "attribution", "logprobs", "worst", "floors", "control", "metrics", "prompts", "record"):
        assert f'id="s0-{block}"' in page


def test_page_of_both_begins_with_the_findings_that_a_demonstration_prints_the_gravest_first(
    compare: Path, bisect: Path
) -> None:
    runs = [open_run(compare), open_run(bisect)]
    found = [f for run in runs for f in run.findings]
    assert runs[1].verdict is not None
    printed = one_of_each_kind(found, answer=runs[1].verdict["sentence"])[:NUM_FINDINGS]
    section = headline(runs)
    assert [s.text for s in section.findings] == [spoken(f["text"]) for f in printed]
    order = [SEVERITIES.index(s.severity) for s in section.further]
    assert order == sorted(order, reverse=True) and len(order) > 3


def test_command_to_repeat_each_run_is_on_the_page(page: str) -> None:
    assert "rpadiag compare smollm2-135m prompts.txt" in page
    assert "--regions rope,swiglu,rmsnorm" in page


def test_every_figure_has_a_place_a_description_and_only_known_light_colours(page: str) -> None:
    data = figures_of(page)
    keys = [f["key"] for f in data["list"]]  # type: ignore[attr-defined]
    assert len(keys) == len(set(keys)) == 8
    for key in keys:
        assert re.search(rf'id="{key}" role="(img|application)"[^>]* aria-label="[^"]{{20,}}"', page)
    used = set(re.findall(r"#[0-9a-f]{6}\b", json.dumps(data["list"])))
    assert used <= set(data["twins"])  # type: ignore[arg-type]


def test_comparison_and_bisection_of_other_tokens_are_not_comparable(compare: Path, tmp_path: Path) -> None:
    other = write_bisect(tmp_path / "bisect", num_tokens=50)
    with pytest.raises(NotComparableError):
        write_report([compare, other], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_comparison_and_bisection_of_other_weights_are_not_comparable(compare: Path, tmp_path: Path) -> None:
    other = write_bisect(tmp_path / "bisect", weight="ff")
    with pytest.raises(NotComparableError, match="different weights"):
        write_report([compare, other], tmp_path / "r.html")


def test_bisection_of_the_prompts_joins_a_comparison_that_also_generated(compare: Path, tmp_path: Path) -> None:
    prompts_only = write_bisect(tmp_path / "bisect", generated=0)
    page = write_report([compare, prompts_only], tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count('<article class="section"') == 1
    other_weights = write_bisect(tmp_path / "other", generated=0, weight="ff")
    with pytest.raises(NotComparableError):
        write_report([compare, other_weights], tmp_path / "r.html")


@pytest.mark.parametrize(
    "shape",
    [
        {"spread": 0.0, "kind": "identical"},
        {"spread": 60.0, "kind": "different computation"},
        {"decoded": False},
        {"num_layers": 1, "num_prompts": 1, "num_tokens": 2, "generated": 0},
    ],
    ids=["identical", "far apart", "no text", "one layer and one scored token"],
)
def test_extreme_runs_still_make_a_page(shape: dict[str, Any], tmp_path: Path) -> None:
    page = write_report([write_compare(tmp_path / "run", **shape)], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "NaN" not in json.dumps(figures_of(page))
    assert ">nan<" not in without_scripts(page)


def test_two_comparisons_stand_side_by_side_and_get_a_section_each(compare: Path, tmp_path: Path) -> None:
    other = write_compare(tmp_path / "later", num_prompts=2, kind="different computation")
    page = write_report([compare, other], tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count('<article class="section"') == 3
    assert page.index('id="runs"') < page.index('id="s0"') < page.index('id="s1"')
    assert page.count("<h1") == 1 and "later: Trainer against rollout" in page
    assert "kind-different-computation" in without_scripts(page)


def test_bisection_alone_is_a_page_of_its_own(bisect: Path, tmp_path: Path) -> None:
    page = write_report([bisect], tmp_path / "r.html").read_text(encoding="utf-8")
    assert 'id="s0-attribution"' in page
    assert 'id="s0-logprobs"' not in page


def test_failed_self_control_is_shown_as_a_warning(tmp_path: Path) -> None:
    run = write_bisect(tmp_path / "bisect", ranked=False)
    body = without_scripts(write_report([run], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert 'class="caution"' in body
    assert "kind-inconclusive" in body


def test_run_with_a_verdict_and_no_tables_still_makes_a_page(tmp_path: Path) -> None:
    from rpadiag.findings import Verdict

    with create_run(tmp_path / "run", command="compare", options={"model": "m"}) as run:
        run.set_verdict(Verdict(kind="not comparable", sentence="Not comparable: 2 weight tensors differ."))
    body = without_scripts(write_report([tmp_path / "run"], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "2 weight tensors differ." in body
    assert "kind-not-comparable" in body


def test_incomplete_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), create_run(tmp_path / "run", command="compare", options={}):
        raise KeyboardInterrupt
    with pytest.raises(InputError, match="interrupted"):
        write_report([tmp_path / "run"], tmp_path / "r.html")
    assert os.listdir(tmp_path) == ["run"]


def test_no_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_report([], tmp_path / "r.html")


def test_place_that_cannot_be_written_is_an_error_before_any_run_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*No such file or directory"):
        write_report([tmp_path / "absent run"], tmp_path / "absent" / "r.html")
    with pytest.raises(InputError, match="is a directory"):
        write_report([tmp_path / "absent run"], tmp_path)


def test_earlier_page_survives_a_failure(tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    target.write_text("earlier")
    with pytest.raises(InputError, match="does not exist"):
        write_report([tmp_path / "absent"], target)
    assert target.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["r.html"]


def test_page_is_made_without_torch_or_an_engine(compare: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'transformers', 'triton'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from rpadiag.reports.html import write_report\n"
        f"write_report([Path({str(compare)!r})], Path({str(tmp_path / 'r.html')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.html").stat().st_size > 1_000_000
