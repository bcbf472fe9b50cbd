"""What a gate may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpadiag.errors import UsageError
from rpadiag.gates import load_policy, parse_gate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k3_kl<=1e-3", ("k3_kl", "<=", 1e-3, False)),
        ("  decode.mean_abs_d < .05 ", ("decode.mean_abs_d", "<", 0.05, False)),
        ("first_divergent_site==none", ("first_divergent_site", "==", "none", False)),
        ('first_divergent_site != "layers.0.q_rope"', ("first_divergent_site", "!=", "layers.0.q_rope", False)),
        ("verdict=='rounding only'", ("verdict", "==", "rounding only", False)),
        ("verdict==rounding only", ("verdict", "==", "rounding only", False)),
        ("local_differing.rope<=0.25", ("local_differing.rope", "<=", 0.25, False)),
        ("floors.trainer_padded.k3_kl<=1e-2", ("floors.trainer_padded.k3_kl", "<=", 1e-2, False)),
        ("attribution.all.systematic_sq<=2.5e-4", ("attribution.all.systematic_sq", "<=", 2.5e-4, False)),
        ("attribution.rope.detectable==false", ("attribution.rope.detectable", "==", 0.0, False)),
        ("num_findings.error==0", ("num_findings.error", "==", 0.0, False)),
        ("delta(k3_kl)<=1e-4", ("k3_kl", "<=", 1e-4, True)),
        ("delta(kl)>=-1e-4", ("kl", ">=", -1e-4, True)),
        ("k3_kl<=baseline", ("k3_kl", "<=", 0.0, True)),
        ("k3_kl<=baseline*1.1+1e-4", ("k3_kl", "<=", 1e-4, True)),
        ("k3_kl <= baseline - 1e-4", ("k3_kl", "<=", -1e-4, True)),
        ("first_divergent_site==baseline", ("first_divergent_site", "==", 0.0, True)),
    ],
)
def test_gate_is_read_as_written(text: str, expected: tuple[object, ...]) -> None:
    gate = parse_gate(text)
    assert (gate.metric, gate.op, gate.bound, gate.relative) == expected
    assert gate.factor == (1.1 if "1.1" in text else 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k3_kl", "is not METRIC OP VALUE"),
        ("", "is not METRIC OP VALUE"),
        ("k3_kl=1", "is not METRIC OP VALUE"),
        ("k3<=1", "unknown metric: k3"),
        ("local_differing.ropes<=1", "unknown region: ropes"),
        ("attribution.rope.rms<=1", "unknown attribution column: rms"),
        ("floors.a.kl<=1", "unknown floor metric: kl"),
        ("num_findings.bad==0", "unknown severity: bad"),
        ("sequence_outliers==0", "unknown metric"),
        ("k3_kl<=low", "'low' is not a number"),
        ("k3_kl<=nan", "'nan' is not a number"),
        ("k3_kl<=inf", "'inf' is not a number"),
        ("k3_kl<=1e999", "too large to be held against anything"),
        ("k3_kl<=baseline*1e999", "too large to be held against anything"),
        ("verdict<=identical", "hold it with == or !="),
        ("verdict==<b>", "is not a name"),
        ("k3_kl!=baseline", "cannot be demanded"),
        ("verdict==baseline*2", "can only be == baseline"),
        ("delta(k3_kl)<=baseline", "is not a number"),
        ("__import__('os')<=1", "is not METRIC OP VALUE"),
    ],
)
def test_gate_outside_the_grammar_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gate(text)
    assert message in str(caught.value)


def test_unknown_metric_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        parse_gate("k3_kll<=1")
    assert "did you mean k3_kl?" in str(caught.value) and "local_differing.REGION" in str(caught.value)


POLICY = """
baseline = "runs/good"
[gates.mismatch]
gate = "k3_kl <= 1e-3"
reason = "runs diverged above this"
[gates."no regression"]
gate = "k3_kl <= baseline"
"""


def test_policy_file_gives_named_gates_and_a_baseline_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    path.write_text(POLICY)
    policy = load_policy(path)
    assert [g.name for g in policy.gates] == ["mismatch", "no regression"]
    assert policy.gates[0].reason == "runs diverged above this"
    assert policy.baseline == tmp_path / "runs" / "good"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no gates"),
        ("[gates]", "has no gates"),
        ("[gates.a]\ngates = 'kl<=1'", "gates.a has no gate"),
        ("[gates.a]\ngate = 'kl<=1'\nseverity = 'low'", "gates.a has no entry severity"),
        ("metrics = 1\n[gates.a]\ngate = 'kl<=1'", "the policy has no entry metrics"),
        ("[gates.a]\ngate = 'kl<=x'", "gates.toml, a: gate"),
        ("[gates.a", "is not valid TOML"),
        ("gates = " + "{a = " * 3000, "is not valid TOML"),
        ("[gates.a]\ngate = 'kl<=1'\nreason = {a = 1}", "the reason of gates.a is no text"),
        ("baseline = 3\n[gates.a]\ngate = 'kl<=1'", "baseline is not a path"),
    ],
)
def test_policy_that_says_something_else_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    from rpadiag.errors import RpadiagError

    path = tmp_path / "gates.toml"
    path.write_text(text)
    with pytest.raises(RpadiagError) as caught:
        load_policy(path)
    assert message in str(caught.value)
