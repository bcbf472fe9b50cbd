"""examples/rl without an engine: the task, the arms, the optimizer, the definition of collapse, tables and figures."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import arms
import collapse
import engine
import figure
import masters
import models
import pytest
import regime
import sweep
import table
import tasks
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl"

# -- the task -----------------------------------------------------------------------------------------------------


def test_every_solution_of_the_pretraining_text_is_right_and_fits() -> None:
    rng = random.Random(0)
    for task in (tasks.Task(terms=2, digits=1), tasks.Task(terms=12, digits=2)):
        for problem in tasks.problems(task, 200, seed=3):
            text = problem.solution(rng)
            assert tasks.is_right(text, problem.answer)
            assert len(text) + 1 <= task.max_completion_tokens()


@pytest.mark.parametrize("text", ["", "57", "#58", "3+4=7;#57;", "3+4=7;#57#57", "3+4=7;# 57"])
def test_any_other_text_is_worth_nothing(text: str) -> None:
    assert not tasks.is_right(text, 57)
    assert tasks.is_right("3+4=7;#57", 57)


def test_plain_words_are_right_where_the_first_line_ends_in_the_answer() -> None:
    assert tasks.is_right(" 12 + 3 = 15. Answer: 15", 15, words=True)
    assert not tasks.is_right(" 12 + 3 = 15.\nAnswer: 15", 15, words=True)
    assert tasks.rewards(["#15", "Answer: 15"], [15, 15], [False, True]) == [0.0, 1.0]  # no step before the sum


def test_prompts_of_a_task_are_equally_long_and_depend_on_the_seed_alone() -> None:
    task = tasks.Task(terms=4, digits=2)
    first, again, other = (tasks.problems(task, 50, seed=s) for s in (1, 1, 2))
    assert first == again != other
    assert len({len(p.prompt()) for p in first}) == 1
    assert tasks.problems(task, 10, seed=1) == first[:10]  # more rounds do not change the earlier ones


def test_saved_tokenizer_gives_one_token_a_character(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tasks.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "12+30=42;#42"
    assert tokenizer(text)["input_ids"] == tasks.encode(text)
    assert tokenizer.decode(tasks.encode(text)) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (tasks.PAD_ID, tasks.END_ID)


def test_labels_of_the_pretraining_text_are_its_solutions() -> None:
    recipe = dataclasses.replace(models.RECIPES["qwen3-micro"], pool=20)
    tokens, labels = models.text_of(recipe)
    for ids, wanted in zip(tokens.tolist(), labels.tolist(), strict=True):
        kept = [label for label in wanted if label != -100]
        prompt = tasks.CHARACTERS.index("=") + 2
        start = ids.index(prompt) + 1
        assert kept == ids[start : start + len(kept)] and kept[-1] == tasks.END_ID


# -- arms ---------------------------------------------------------------------------------------------------------


def test_arms_differ_from_the_baseline_only_in_what_they_are_about() -> None:
    base = dataclasses.asdict(arms.ARMS[arms.BASELINE])
    differ = {
        name: {field for field, value in dataclasses.asdict(arm).items() if value != base[field]} - {"text"}
        for name, arm in arms.ARMS.items()
    }
    assert differ == {
        "bf16": set(),
        "rope": {"regions"},
        "fp32-output": {"regions"},
        "engine": {"regions", "contract"},
        "fp32": {"trainer_dtype"},
        "fp16": {"trainer_dtype", "engine_dtype"},
        "tis": {"truncated"},
    }


def test_contract_of_the_engine_follows_device_and_mode_or_a_fingerprint() -> None:
    engine = arms.ARMS["engine"]
    assert arms.contract_of(engine, device="cuda", mode="eager") == "vllm-eager"
    assert arms.contract_of(engine, device="cuda", mode="compiled") == "vllm-compiled"
    assert arms.contract_of(engine, device="cuda", mode="eager", given="contract.json") == "contract.json"
    assert arms.contract_of(arms.ARMS["rope"], device="cuda", mode="eager", given="contract.json") == "fp32-output"
    assert arms.contract_of(engine, device="cpu", mode="compiled") == "vllm-cpu-compiled"
    with pytest.raises(SystemExit, match="no contract is known for vLLM eager on xpu"):
        arms.contract_of(engine, device="xpu", mode="eager")


def test_a_regime_is_a_preset_with_named_overrides() -> None:
    given = regime.regime_of("calm", ["learning_rate=3e-4", "rounds=7", "length=long"])
    assert (given.learning_rate, given.rounds, given.length) == (3e-4, 7, "long")
    with pytest.raises(SystemExit, match="hint: NAME=VALUE with one of learning_rate"):
        regime.regime_of("calm", ["lr=1"])
    with pytest.raises(SystemExit, match="rounds is of type int"):
        regime.regime_of("calm", ["rounds=many"])
    with pytest.raises(SystemExit, match="one of calm, harsh, micro"):
        regime.regime_of("mild")
    with pytest.raises(SystemExit, match=r"do not divide .*\nhint: --set num_minibatches to a divisor of 128"):
        regime.regime_of("calm", ["num_minibatches=3"])


# -- optimizer ----------------------------------------------------------------------------------------------------


def optimizer(weight: torch.nn.Parameter, **how: Any) -> masters.MasterAdamW:
    given = {"lr": 1e-5, "betas": (0.9, 0.98), "eps": 1e-8, "max_grad_norm": 0.0, "stored": torch.bfloat16, **how}
    return masters.MasterAdamW([weight], **given)


def test_updates_too_small_for_bf16_add_up_in_the_masters() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    own = optimizer(weight)
    for _ in range(500):
        weight.grad = torch.ones_like(weight)
        own.step()
    assert torch.equal(
        weight, torch.full_like(weight, 0.9961)
    )  # 1 - 500e-5, to BF16; in place every update would be lost


def test_masters_move_as_adamw_in_fp32_does_with_clipping() -> None:
    gradients = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, generator=gradients))
    twin = torch.nn.Parameter(weight.detach().clone())
    own = optimizer(weight, lr=1e-2, max_grad_norm=1.0, stored=torch.float32)
    other = torch.optim.AdamW([twin], lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    for _ in range(5):
        gradient = torch.randn(64, generator=gradients)
        weight.grad, twin.grad = gradient.clone(), gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([twin], 1.0)
        own.step()
        other.step()
        assert own.norms[-1] == float(norm)
    assert torch.equal(weight, twin)


def test_loss_scale_changes_no_bit_of_the_update_and_halves_on_overflow() -> None:
    ends = []
    for scale in (None, 2.0**12):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))
        own = optimizer(weight, lr=1e-2, stored=torch.float16, loss_scale=scale)
        masters.scaled(weight.square().sum(), own.scale).backward()
        own.step()
        ends.append(weight.detach().clone())
        if scale is not None:
            weight.grad = torch.full_like(weight, math.inf)
            own.step()
            assert (own.scale, own.skipped) == (2.0**11, 1) and torch.equal(weight, ends[-1])
    assert torch.equal(*ends)


def test_weights_of_a_wider_trainer_hold_the_bits_of_the_engine() -> None:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 8).to(torch.bfloat16).float())
    own = optimizer(weight, lr=1e-3)
    weight.grad = torch.ones_like(weight)
    own.step()
    assert torch.equal(weight, weight.to(torch.bfloat16).float()) and not torch.equal(weight, own.masters[0])


def test_state_of_the_optimizer_comes_back_to_the_bit(tmp_path: Path) -> None:
    def steps(own: masters.MasterAdamW, weight: torch.nn.Parameter, numbers: range) -> None:
        for number in numbers:
            weight.grad = torch.randn(16, generator=torch.Generator().manual_seed(number)).to(weight.dtype)
            own.step()

    straight = torch.nn.Parameter(torch.linspace(-1, 1, 16).to(torch.bfloat16))
    broken = torch.nn.Parameter(straight.detach().clone())
    one, two = optimizer(straight, lr=1e-3), optimizer(broken, lr=1e-3)
    steps(one, straight, range(6))
    steps(two, broken, range(3))
    torch.save(two.state_dict(), tmp_path / "optimizer.pt")
    fresh = torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    again = optimizer(fresh, lr=1e-3)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    steps(again, fresh, range(3, 6))
    assert torch.equal(fresh, straight) and torch.equal(again.masters[0], one.masters[0])


# -- collapse -----------------------------------------------------------------------------------------------------


def test_reward_that_falls_below_half_of_its_best_and_stays_there_has_collapsed() -> None:
    found = collapse.collapse([0.6] * 50 + [0.1] * 40)
    assert found.why == "reward" and found.best == pytest.approx(0.6)
    assert found.round == 56  # the first whose last ten rounds average below 0.3: seven at 0.1, three at 0.6


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.6] * 50 + [0.1] * 30 + [0.6] * 30, "it came back"),
        ([0.6] * 50 + [0.1] * 14, "not long enough below"),
        ([0.6] * 50 + [0.35] * 40, "more than half is left"),
        ([0.05] * 50 + [0.0] * 40, "there was nothing to lose"),
        ([0.3] * 5, "too short"),
        ([], "no round"),
    ],
)  # fmt: skip
def test_other_curves_have_not_collapsed(rewards: list[float], reason: str) -> None:
    assert collapse.collapse(rewards).round is None, reason


def test_unbroken_end_without_a_finite_gradient_is_a_collapse() -> None:
    finite = [True] * 20 + [False] * 3 + [True] + [False] * 10
    assert collapse.collapse([0.5] * 34, finite) == collapse.Collapse(round=24, why="not finite", best=0.5)
    assert collapse.collapse([0.5] * 33, finite[:33]).round is None


# -- tables and figures -------------------------------------------------------------------------------------------


def row(arm: str, number: int, **values: Any) -> dict[str, Any]:
    base = {
        "reward": 0.5,
        "loss": 0.1,
        "grad_norm": 1.0,
        "k3_kl": 1e-3,
        "ess": 0.99,
        "seconds_generate": 1.0,
        "seconds_sync": 0.5,
        "learning_rate": 5e-5,
        **dict.fromkeys(("systematic_sq", "chaotic_sq")),
    }
    return {
        "model": "qwen3-s",
        "engine": "eager",
        "arm": arm,
        "seed": 0,
        "round": number,
        "seconds_train": 0.5,
        **base,
        **values,
    }


def written(path: Path) -> Path:
    rows = [row("bf16", n, reward=0.6 if n < 50 else 0.05) for n in range(90)]
    rows += [row("fp32", n, seconds_train=1.5) for n in range(90)]
    table.write_table(path, rows, {"runs": {}})
    return path


def test_table_of_steps_is_read_as_it_was_written_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    rows, about = table.read_table(written(tmp_path / "steps.parquet"))
    assert len(rows) == 180 and rows[0]["reward"] == 0.6 and rows[0]["systematic_sq"] is None
    assert about == {"schema_version": table.SCHEMA_VERSION, "runs": {}}
    with pytest.raises(ValueError, match="no such columns"):
        table.write_table(tmp_path / "other.parquet", [{"rewards": 1.0}], {})


def test_table_of_another_schema_is_refused(tmp_path: Path) -> None:
    table.write_table(tmp_path / "steps.parquet", [], {"schema_version": 0})
    with pytest.raises(ValueError, match=f"schema version 0, expected {table.SCHEMA_VERSION}"):
        table.read_table(tmp_path / "steps.parquet")


def test_columns_of_nulls_are_empty_cells_and_no_cost_is_divided_by_nothing() -> None:
    gone = dict.fromkeys(("k3_kl", "ess", "systematic_sq", "chaotic_sq"))
    still = dict.fromkeys(figure.COST, 0.0)
    runs = figure.runs_of([row(arm, n, **gone, **still) for arm in ("bf16", "fp32") for n in range(12)])
    assert figure.markdown(runs).splitlines()[-1].endswith("| 0 of 1 |  |  |  |  |  |")
    assert "nan" not in figure.svg(runs)


def test_figure_counts_collapses_and_pairs_costs(tmp_path: Path) -> None:
    steps = written(tmp_path / "steps.parquet")
    command = [sys.executable, str(EXAMPLE / "figure.py"), str(steps), "--svg", str(tmp_path / "curves.svg")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    cells = {line.split(" | ")[1]: line.strip("| ").split(" | ") for line in lines[2:]}
    assert cells["bf16"][6] == "1 of 1 (round 55)" and cells["fp32"][6] == "0 of 1"
    assert cells["bf16"][-1] == "1" and cells["fp32"][-1] == "1.50 (1.50 to 1.50)"
    drawn = ElementTree.parse(tmp_path / "curves.svg").getroot()
    kinds = [element.tag.rpartition("}")[2] for element in drawn.iter()]
    assert kinds.count("polyline") == 2 * len(figure.PANELS) and kinds.count("circle") == 1
    assert "prefers-color-scheme:dark" in (tmp_path / "curves.svg").read_text(encoding="utf-8")


def test_curve_and_median_have_no_point_where_a_round_has_no_value() -> None:
    width = collapse.SMOOTH
    rounds = [row("fp16", n, grad_norm=None if n == width else 2.0) for n in range(2 * width + 2)]
    line = figure.curves(rounds, "grad_norm")
    assert line == [(n, 2.0) for n in (*range(width), 2 * width, 2 * width + 1)]
    other = [(n, 4.0) for n in range(2 * width + 2)]
    assert figure.median_of([line, other]) == [(n, 3.0) for n, _ in line]


def test_columns_measured_now_and_then_are_drawn_as_they_are() -> None:
    rounds = [row("bf16", n, systematic_sq=1e-5 * n if n % 10 == 0 else None) for n in range(31)]
    assert figure.curves(rounds, "systematic_sq") == [(n, 1e-5 * n) for n in (0, 10, 20, 30)]


def test_learning_rates_and_modes_of_a_model_are_compared_apart(tmp_path: Path) -> None:
    rows = [
        row("bf16", n, learning_rate=rate, engine=mode)
        for rate, mode in ((5e-5, "eager"), (1e-4, "eager"), (5e-5, "compiled"))
        for n in range(12)
    ]
    table.write_table(tmp_path / "steps.parquet", rows, {})
    runs = figure.runs_of(table.read_table(tmp_path / "steps.parquet")[0])
    assert [key[0] for key in runs] == ["qwen3-s, eager, 5e-5", "qwen3-s, eager, 1e-4", "qwen3-s, compiled, 5e-5"]
    assert all(len(r) == 12 for r in runs.values())
    assert "qwen3-s, compiled, 5e-5: reward" in figure.svg(runs)


def test_controls_are_drawn_beside_the_arms() -> None:
    runs = figure.runs_of([row(arm, n) for arm in ("bf16", "fp8-cache") for n in range(12)])
    assert figure.COLOURS["fp8-cache"] in figure.svg(runs) and "| fp8-cache |" in figure.markdown(runs)


def test_every_column_has_a_description() -> None:
    assert all(text and not text.endswith(".") for _, text in table.COLUMNS.values())


# -- sweeps -------------------------------------------------------------------------------------------------------


def test_plan_starts_all_arms_of_a_seed_side_by_side(tmp_path: Path) -> None:
    runs = sweep.plan(["a", "b"], ["x", "y"], [0, 1], tmp_path)
    assert [r.name for r in runs] == ["a-x-s0", "a-y-s0", "b-x-s0", "b-y-s0", "a-x-s1", "a-y-s1", "b-x-s1", "b-y-s1"]


def test_a_run_that_fails_stops_no_other_and_is_named_in_the_end(tmp_path: Path) -> None:
    runs = sweep.plan(["qwen3-micro"], ["fp16", "nothing"], [0], tmp_path)
    runs[0].directory.mkdir(parents=True)
    (runs[0].directory / "status.json").write_text(json.dumps({"status": "complete", "rounds": 4}), encoding="utf-8")
    sweep.Sweep(runs, processes=2, deadline=sweep.time.monotonic() + 200, arguments=["--preset", "micro"]).work()
    assert sweep.merge(runs, tmp_path) == 0
    ends = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert ends["qwen3-micro-fp16-s0"]["status"] == "complete"
    failed = ends["qwen3-micro-nothing-s0"]
    assert failed["status"] == "failed" and failed["code"] == 1
    assert failed["log"].startswith("error: unknown arm 'nothing'; hint: one of bf16")


def test_runs_that_start_at_once_meet_at_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer.utils import ensure_master_addr_port

    for name, value in engine.own_rendezvous().items():
        monkeypatch.setenv(name, value)
    port = os.environ["MASTER_PORT"]
    ensure_master_addr_port()  # what TRL does before it starts vLLM
    assert os.environ["MASTER_PORT"] == port != "29500" and port != engine.own_rendezvous()["MASTER_PORT"]


def test_sweep_without_enough_time_starts_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep.plan(["qwen3-micro"], ["bf16"], [0], tmp_path)
    sweep.Sweep(runs, processes=2, deadline=sweep.time.monotonic() + 5, arguments=[]).work()
    assert runs[0].status() == {"status": "planned", "rounds": 0}
    assert "no time is left to start 1 runs" in capsys.readouterr().err
