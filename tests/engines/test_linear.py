"""First-order effects against finite differences, and forward against backward mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import make_checkpoint, token_ids

from rpadiag.engines.linear import LinearTrainer
from rpadiag.engines.switches import eager_attention
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.trainer_capture import attention_override
from rpadiag.regions.align import align

IDS = token_ids(24)
STEP = 2e-3  # transformers computes norms and softmax in FP32 whatever the dtype: a smaller step would measure its rounding


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def linear(request, tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("linear") / request.param, request.param)
    return LinearTrainer(TrainerEngine.load(path), dtype=torch.float64)


def logprobs(linear):
    with torch.no_grad():
        logits = linear._engine.model(input_ids=torch.tensor([IDS])).logits[0].double()
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(IDS)[1:, None])[:, 0].numpy()


def moved(linear, site, error):
    """Logprobs with the tensor at a site moved by hand."""
    layer = linear._engine.model.model.layers[1]
    point = site.rpartition(".")[2]
    handles, attention = [], None
    if point in ("q_rope", "k_rope"):

        def attention(module, query, key, *args, **kwargs):
            if module is layer.self_attn:
                shift = error.reshape(1, len(IDS), -1, 32).transpose(1, 2)
                query, key = (query + shift, key) if point == "q_rope" else (query, key + shift)
            return eager_attention(module, query, key, *args, **kwargs)
    elif point == "act":
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(lambda _m, args: (args[0] + error,)))
    elif point == "resid_attn":  # the stream is moved by what the output projection adds to it
        handles.append(layer.self_attn.o_proj.register_forward_hook(lambda _m, _a, out: out + error))
    else:
        module = {"input_norm": layer.input_layernorm, "o": layer.self_attn.o_proj, "v": layer.self_attn.v_proj}[point]
        handles.append(module.register_forward_hook(lambda _m, _a, out: out + error))
    try:
        if attention is None:
            return logprobs(linear)
        with attention_override(linear._engine.model, attention):
            return logprobs(linear)
    finally:
        for handle in handles:
            handle.remove()


WIDTHS = {"q_rope": 128, "k_rope": 64, "act": 256, "resid_attn": 128, "input_norm": 128, "o": 128, "v": 64}


@pytest.mark.parametrize("point", WIDTHS)
def test_changes_are_those_of_finite_differences(linear, point):
    site = f"layers.1.{point}"
    error = torch.randn(len(IDS), WIDTHS[point], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = (moved(linear, site, STEP * error) - moved(linear, site, -STEP * error)) / (2 * STEP)
    got = linear.changes(IDS, {site: error})
    assert np.abs(expected).max() > 0.05
    assert np.abs(got - expected).max() < 5e-3 * np.abs(expected).max()


def test_backward_gives_the_sum_of_what_forward_gives(linear):
    generator = torch.Generator().manual_seed(5)
    widths = {f"layers.{n}.{p}": w for n in (0, 1) for p, w in WIDTHS.items()} | {"final_norm": 128, "logits": 512}
    errors = {s: torch.randn(len(IDS), w, generator=generator, dtype=torch.float64) for s, w in widths.items()}
    gradients = linear.gradients(IDS, list(errors))
    assert set(gradients) == set(errors)
    total = sum(float((gradients[s] * errors[s]).sum()) for s in errors)
    assert total == pytest.approx(linear.changes(IDS, errors).sum(), rel=1e-5)
    for site in errors:
        alone = linear.changes(IDS, {site: errors[site]}).sum()
        assert alone == pytest.approx(float((gradients[site] * errors[site]).sum()), rel=1e-4, abs=1e-4), site


def test_sequences_in_one_padded_pass_have_what_each_has_alone(linear):
    sequences = [IDS, IDS[:15], token_ids(20, seed=4)]
    generator = torch.Generator().manual_seed(7)
    widths = {f"layers.1.{p}": w for p, w in WIDTHS.items()} | {"final_norm": 128, "logits": 512}
    errors = {s: torch.randn(3, len(IDS), w, generator=generator, dtype=torch.float64) for s, w in widths.items()}
    changes, gradients = linear.changes_of(sequences, errors), linear.gradients_of(sequences, list(errors))
    for row, ids in enumerate(sequences):  # what stands behind a sequence's end counts for nothing
        alone = linear.changes(ids, {s: e[row, : len(ids)] for s, e in errors.items()})
        assert changes[row].shape == alone.shape
        assert np.abs(changes[row] - alone).max() < 1e-5 * np.abs(alone).max()  # norms and softmax are FP32
        for site, gradient in linear.gradients(ids, list(errors)).items():
            together = gradients[site][row]
            assert (together[: len(ids)] - gradient).abs().max() < 1e-5 * gradient.abs().max(), site
            assert not together[len(ids) :].any(), site


def test_changes_act_on_later_tokens_only(linear):
    error = torch.zeros(len(IDS), 128, dtype=torch.float64)
    error[10] = 1.0
    got = linear.changes(IDS, {"layers.0.o": error})
    assert (got[:10] == 0).all() and (got[10:] != 0).all()


def test_the_trainer_itself_is_left_alone(tmp_path):
    trainer = TrainerEngine.load(make_checkpoint(tmp_path / "llama"))
    before = trainer.forward(IDS).logprob
    linear = LinearTrainer(trainer)
    linear.changes(IDS, {"layers.0.o": torch.ones(len(IDS), 128)})
    linear.gradients(IDS, ["layers.0.o"])
    assert np.array_equal(trainer.forward(IDS).logprob, before)
    assert trainer.dtype == torch.bfloat16 and all(p.requires_grad for p in trainer.model.parameters())
    with align(trainer.model):
        pass
