"""Rollouts that vLLM really sampled, recorded without the trainer's log-probabilities and scored by the trainer engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import planted_copy, token_ids

from rpadiag.cli.app import run as rpadiag
from rpadiag.engines.base import TokenSequence
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.reports.records import command_line
from rpadiag.runs import open_run

pytestmark = pytest.mark.vllm
NUM_PROMPT, NUM_TOKENS, NUM_SEQUENCES = 8, 40, 16
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3 with logits four times as large: a model that is sure of some tokens, as trained ones are."""

    def sharpen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"].mul_(4)

    return planted_copy(tiny("qwen3"), tmp_path_factory.mktemp("scored") / "sharp", tensors=sharpen)


@pytest.fixture(scope="module")
def engine(model: Path, vllm_on: Callable[..., Any]) -> Iterator[Any]:
    engine = vllm_on(model, max_model_len=64)
    yield engine
    engine.reload(logprobs_mode="raw_logprobs")


def sampled(engine: Any, temperature: float) -> Rows:
    """Records of TRL's shape with the log-probabilities that vLLM gave while it sampled."""
    prompts = [
        TokenSequence(prompt=i, token_ids=tuple(token_ids(NUM_PROMPT, seed=i)), num_prompt_tokens=NUM_PROMPT)
        for i in range(NUM_SEQUENCES)
    ]
    results = engine.score(prompts, num_generate=NUM_TOKENS, together=True, seed=3, temperature=temperature)
    return [
        {
            "prompt_ids": list(r.sequence.token_ids[:NUM_PROMPT]),
            "completion_ids": list(r.sequence.token_ids[NUM_PROMPT:]),
            "sampling_per_token_logps": r.scores.logprob[NUM_PROMPT - 1 :].tolist(),
        }
        for r in results
    ]


@pytest.fixture(scope="module")
def raw(engine: Any) -> Rows:
    return sampled(engine, 1.0)


@pytest.fixture(scope="module")
def processed(engine: Any) -> Rows:
    """Sampled at 0.6, log-probabilities of the distribution after temperature, in the schema that records it."""
    engine.reload(logprobs_mode="processed_logprobs")
    rows = sampled(engine, 0.6)
    engine.reload(logprobs_mode="raw_logprobs")
    return [
        {
            "token_ids": r["prompt_ids"] + r["completion_ids"],
            "rollout_logprobs": r["sampling_per_token_logps"],
            "temperature": 0.6,
        }
        for r in rows
    ]


def written(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert rpadiag(["rollouts", *map(str, arguments), "--format", "json"]) == code
    return dict(json.loads(capsys.readouterr().out))


def test_sampled_tokens_are_scored_as_the_trainer_scores_them_and_raise_no_fault(
    raw: Rows, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = written(tmp_path / "r.jsonl", raw), tmp_path / "run"
    found = answer(capsys, path, "--model", model, "--run", run)
    assert found["faults"] == [] and found["verdict"] is None
    assert found["metrics"]["num_tokens"] == NUM_SEQUENCES * NUM_TOKENS
    assert 0 < found["metrics"]["mean_abs_d"] < 0.2
    tokens, prompts = open_run(run).tokens(), open_run(run).prompts()
    trainer = TrainerEngine.load(model)
    scores = [trainer.forward(r["prompt_ids"] + r["completion_ids"]) for r in raw]
    for column, name in (("p", "logprob"), ("p_entropy", "entropy"), ("p_rank", "rank"), ("p_argmax", "argmax")):
        expected = np.concatenate([getattr(s, name)[NUM_PROMPT - 1 :] for s in scores])
        assert np.array_equal(tokens[column].to_numpy(expected.dtype), expected)
    assert tokens["text"].tolist()[:3] == [trainer.tokenizer.decode([t]) for t in raw[0]["completion_ids"][:3]]
    assert prompts["text"][0] == trainer.tokenizer.decode(raw[0]["prompt_ids"])


def test_scored_run_is_reported_and_gated_and_names_its_trainer(
    raw: Rows, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    answer(capsys, written(tmp_path / "r.jsonl", raw), "--model", model, "--run", run)
    manifest = open_run(run).manifest
    assert manifest["trainer"]["family"] == "qwen3" and manifest["rollouts"]["temperatures"] == [1.0]
    assert manifest["weights"]["trainer"]["num_tensors"] > 10
    assert f"--model {model}" in command_line(manifest)
    gates = ["--gate", "faults==0", "--gate", "k3_kl<=1e-2"]
    assert rpadiag(["report", str(run), "--html", str(tmp_path / "r.html"), *gates]) == 0


def test_temperature_of_the_file_is_the_one_that_is_scored_at(
    processed: Rows, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, written(tmp_path / "r.jsonl", processed), "--model", model)
    assert found["faults"] == [] and found["metrics"]["mean_abs_d"] < 0.2


def test_temperature_that_the_file_does_not_record_is_recognised_and_named(
    processed: Rows, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{k: v for k, v in row.items() if k != "temperature"} for row in processed]
    path = written(tmp_path / "r.jsonl", rows)
    found = answer(capsys, path, "--model", model)
    assert found["verdict"]["kind"] == "different computation" and found["faults"] == ["temperature"]
    (said,) = [f for f in found["findings"] if f["code"] == "scored-temperature"]
    assert said["numbers"]["solved"] == pytest.approx(0.6, rel=0.08)
    assert answer(capsys, path, "--model", model, "--temperature", 0.6)["faults"] == []


def test_weights_of_a_later_step_are_stale_and_never_rounding(
    raw: Rows, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(tensors: dict[str, torch.Tensor]) -> None:
        """One policy-gradient step on these very rollouts, half of them rewarded."""
        from transformers import AutoModelForCausalLM

        trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        ids = torch.tensor([r["prompt_ids"] + r["completion_ids"] for r in raw])
        logprobs = torch.log_softmax(trained(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        advantage = torch.tensor([1.0, -1.0] * (NUM_SEQUENCES // 2))[:, None]
        (-(advantage * logprobs[:, NUM_PROMPT - 1 :]).mean()).backward()
        torch.optim.AdamW(trained.parameters(), lr=1e-3).step()
        state = trained.state_dict()
        for name, tensor in tensors.items():
            tensor.copy_(state[name])

    later = planted_copy(model, tmp_path / "later", tensors=step)
    found = answer(capsys, written(tmp_path / "r.jsonl", raw), "--model", later, code=2)
    assert found["verdict"]["kind"] == "not comparable" and "stale-weights" in found["faults"]
    assert found["metrics"] == {}


def test_shifted_column_is_recognised_behind_scored_logprobs(
    raw: Rows, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**r, "sampling_per_token_logps": np.roll(r["sampling_per_token_logps"], 1).tolist()} for r in raw]
    found = answer(capsys, written(tmp_path / "r.jsonl", rows), "--model", model, code=2)
    assert "shifted" in found["faults"]


def test_trainer_column_of_the_file_is_held_against_the_model_that_scores(
    raw: Rows, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = [{**r, "old_per_token_logps": r["sampling_per_token_logps"]} for r in raw]
    found = answer(capsys, written(tmp_path / "copied.jsonl", copied), "--model", model)
    (said,) = [f for f in found["findings"] if f["code"] == "recorded-trainer"]
    assert said["severity"] == "info"
    assert said["numbers"]["mean_abs_d"] == pytest.approx(found["metrics"]["mean_abs_d"], rel=1e-6)
    wrong = [{**r, "old_per_token_logps": [-9.0] * NUM_TOKENS} for r in raw]
    found = answer(capsys, written(tmp_path / "wrong.jsonl", wrong), "--model", model)
    assert [f["severity"] for f in found["findings"] if f["code"] == "recorded-trainer"] == ["warning"]


def test_aligned_trainer_scores_otherwise(
    raw: Rows, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "r.jsonl", raw)
    plain = answer(capsys, path, "--model", model)
    aligned = answer(
        capsys, path, "--model", model, "--align", "all", "--contract", "vllm-cpu", "--run", tmp_path / "run"
    )
    assert aligned["metrics"]["mean_abs_d"] != plain["metrics"]["mean_abs_d"]
    assert open_run(tmp_path / "run").manifest["trainer"]["aligned"]["regions"] == [
        "rope",
        "swiglu",
        "rmsnorm",
        "qk_norm",
    ]
