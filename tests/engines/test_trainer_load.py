"""Checkpoints that are missing, half there, pickled, broken or not supported: each a clear error."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, planted_copy, token_ids

from rpadiag.engines.trainer import TrainerEngine
from rpadiag.errors import EngineError, InputError, UsageError


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny("llama"), tmp_path / "model")


def refuse(directory, match, error=InputError, **arguments):
    with pytest.raises(error, match=match) as caught:
        TrainerEngine.load(directory, **arguments)
    return caught.value


def shard(directory):
    """Split a single-file checkpoint into two shards with an index."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({n: tensors[n] for n in chosen}, directory / file, metadata={"format": "pt"})
    path.unlink()
    weight_map = {name: file for file, chosen in parts.items() for name in chosen}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(parts)


def test_missing_directory_is_an_error(tmp_path):
    refuse(tmp_path / "nowhere", "no model at")


def test_name_that_is_neither_a_directory_nor_a_reachable_hub_id_is_an_error(monkeypatch):
    # the variable is read at import, long ago; without it the library tries five times, and waits in between
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refuse("no-such-organisation/no-such-model", "cannot load no-such-organisation/no-such-model")
    assert "hub id" in error.hint


def test_missing_config_is_an_error(copy):
    (copy / "config.json").unlink()
    refuse(copy, r"has no config\.json")


def test_broken_config_is_an_error(copy):
    (copy / "config.json").write_text('{"architectures": ["Llama')
    refuse(copy, "config.json is not valid JSON")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "abc"}, "cannot load .*hidden_size"),
        ({"vocab_size": None}, "cannot load .*vocab_size"),
        ({"num_attention_heads": 0}, "cannot load"),
        ({"num_attention_heads": 3}, "cannot load .*attention heads"),
        ({"rope_parameters": {"rope_type": "weird", "rope_theta": 1e4}}, "cannot load .*weird"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"holds model\.layers\.1\..* no place for"),
    ],
)
def test_config_that_does_not_fit_the_weights_is_an_error(tiny, tmp_path, changes, message):
    model = planted_copy(tiny("llama"), tmp_path / "m", config=changes)
    refuse(model, "(?s)" + message)


def test_code_in_a_checkpoint_is_not_run_unless_asked_for(copy):
    config = json.loads((copy / "config.json").read_text())
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of", "auto_map": auto_map}))
    (copy / "code.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\n")
    refuse(copy, "(?s)cannot load .*custom code")
    assert not (copy / "ran").exists()


def test_sharded_checkpoint_loads_and_a_missing_shard_is_an_error(copy, tiny):
    files = shard(copy)
    whole = TrainerEngine.load(tiny("llama"))
    assert TrainerEngine.load(copy).weight_digests() == whole.weight_digests()
    (copy / files[1]).unlink()
    error = refuse(copy, f"half a model: .*{files[1]} is missing")
    assert "lists 2 files, 1 of them" in error.detail


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors_is_an_error_that_names_the_file(copy, keep):
    path = copy / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refuse(copy, r"model\.safetensors is (not a whole safetensors file|truncated)")


def test_pickled_weights_are_refused_and_never_opened(copy):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    error = refuse(copy, "only pickled weights")
    assert "safetensors only" in error.detail


def test_directory_without_weights_is_an_error(copy):
    (copy / "model.safetensors").unlink()
    refuse(copy, r"has no model\.safetensors")


def test_checkpoint_that_lacks_a_tensor_is_an_error_that_names_it(tiny, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    model = planted_copy(tiny("llama"), tmp_path / "m", tensors=lambda t: t.pop(name))
    refuse(model, name)


def test_checkpoint_with_a_tensor_of_another_shape_is_an_error_that_names_it(tiny, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    model = planted_copy(tiny("llama"), tmp_path / "m", tensors=lambda t: t.update({name: t[name][:-8].clone()}))
    refuse(model, name.replace(".", r"\."))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_an_error_that_names_the_tensor(tiny, tmp_path, value):
    def plant(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = value

    model = planted_copy(tiny("llama"), tmp_path / "m", tensors=plant)
    error = refuse(model, r"model\.layers\.1\.self_attn\.k_proj\.weight has 1 values that are not finite")
    assert "NaN" in error.detail


def test_weights_that_overflow_the_dtype_are_an_error(tiny, tmp_path):
    def plant(tensors):
        tensors["model.norm.weight"][0] = 1e6

    model = planted_copy(tiny("llama"), tmp_path / "m", tensors=plant)
    refuse(model, r"model\.norm\.weight", dtype="float16")


def test_unsupported_architecture_is_an_error_that_lists_the_supported_ones(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**config, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    )
    error = refuse(copy, "unsupported architecture: GPT2LMHeadModel")
    assert "LlamaForCausalLM" in error.detail


def test_unknown_dtype_and_device_are_errors(copy):
    refuse(copy, "unknown dtype: bf17", error=UsageError, dtype="bf17")
    refuse(copy, "cannot use device", error=EngineError, device="cuda:99")
    refuse(copy, "cannot load", attention="flash_attention_99")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_weights_are_loaded_in_the_dtype_asked_for(tiny, dtype, expected):
    engine = TrainerEngine.load(tiny("llama"), dtype=dtype)
    assert {p.dtype for p in engine.model.parameters()} == {expected}
    assert engine.manifest()["given"]["dtype"] == dtype


def test_missing_tokenizer_is_an_error_only_when_asked_for(tmp_path):
    model = make_checkpoint(tmp_path / "m")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).unlink()
    engine = TrainerEngine.load(model)
    assert len(engine.forward(token_ids(8))) == 7
    with pytest.raises(InputError, match="no tokenizer") as caught:
        _ = engine.tokenizer
    assert "token_ids" in caught.value.hint


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "garbage"),
        ("tokenizer.json", '{"a'),
        ("tokenizer.json", '{"a": 1}'),
        ("tokenizer_config.json", "garbage"),
    ],
)
def test_broken_tokenizer_is_an_error(copy, file, content):
    (copy / file).write_text(content)
    engine = TrainerEngine.load(copy)
    with pytest.raises(InputError, match="no tokenizer"):
        _ = engine.tokenizer


def test_tokenizer_is_the_checkpoints_own(tiny):
    tokenizer = TrainerEngine.load(tiny("llama")).tokenizer
    assert tokenizer.decode(tokenizer("The quick brown fox é").input_ids) == "The quick brown fox é"
    assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
