"""The converted checkpoint: what is in it, once only, and never half of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rpadiag.errors import InputError
from rpadiag.workflows import smollm2 as model

CALL = "from rpadiag.workflows.smollm2 import ensure_model; print(ensure_model())"


def test_checkpoint_holds_every_tensor_as_bf16(smollm2: Path) -> None:
    raw = (smollm2 / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    assert {t["dtype"] for t in header.values()} == {"BF16"}
    assert len(header) == 30 * 9 + 2  # nine tensors a layer, the embedding, the final norm; the head is tied
    config = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config


def test_second_call_only_looks(smollm2: Path) -> None:
    start = time.process_time()
    assert model.ensure_model() == smollm2
    assert time.process_time() - start < 0.1


def test_alias_becomes_the_checkpoint_and_other_models_stay_as_given(smollm2: Path) -> None:
    assert model.resolve_model(model.ALIAS) == str(smollm2)
    assert model.resolve_model("org/name") == "org/name"


def test_directory_that_is_named_like_the_alias_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / model.ALIAS).mkdir()
    assert model.resolve_model(model.ALIAS) == model.ALIAS


def test_cache_variable_counts_only_when_it_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert model.cache_dir() == Path.home() / ".cache" / "rpadiag"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert model.cache_dir() == Path("/somewhere/rpadiag")


def test_cache_that_cannot_be_written_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="cannot be written") as caught:
        model.ensure_model()
    assert "XDG_CACHE_HOME" in str(caught.value)


def test_two_processes_convert_once_and_clear_what_a_killed_one_left(tmp_path: Path, smollm2: Path) -> None:
    cache = tmp_path / "rpadiag"
    stale = cache / f"{smollm2.name}.tmp-killed"
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("{}", encoding="utf-8")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", CALL], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert {child.communicate()[0].strip() for child in both} == {str(cache / smollm2.name)}
    assert sorted(p.name for p in cache.iterdir()) == [smollm2.name, f"{smollm2.name}.lock"]
    assert (cache / smollm2.name / "model.safetensors").read_bytes() == (smollm2 / "model.safetensors").read_bytes()
