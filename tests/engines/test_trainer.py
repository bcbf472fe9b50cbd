"""The trainer engine against plain transformers, on every family's tiny checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import FAMILIES, token_ids

from rpadiag.engines import digests
from rpadiag.engines.trainer import TrainerEngine, move_by_ulps
from rpadiag.errors import CaptureError, InputError, NotComparableError, UsageError
from rpadiag.runs.manifest import differing_tensors, weights_digest

IDS = token_ids(90)  # longer than Mistral's window of 64


def attentions(family):
    """Implementations that compute what the family's configuration says."""
    return ("eager",) if family == "gemma2" else ("sdpa", "eager")


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request, tiny):
    return TrainerEngine.load(tiny(request.param))


@pytest.fixture(scope="module")
def llama(tiny):
    return TrainerEngine.load(tiny("llama"))


def capture(engine, ids=IDS, **arguments):
    found = {}
    scores = engine.forward(
        ids, sites=engine.facts.sites, on_site=lambda site, tensor: found.__setitem__(site, tensor.clone()), **arguments
    )
    return scores, found


def state(engine):
    """Everything a capture or a replay may touch."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return (
        [
            (name, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__, m.training)
            for name, m in engine.model.named_modules()
        ],
        dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
        dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
        engine.model.config._attn_implementation,
    )


def test_scores_are_log_softmax_of_the_plain_forward_to_the_bit(engine):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(
        engine.name, dtype=torch.bfloat16, attn_implementation=engine.manifest()["attention"]
    )
    with torch.no_grad():
        logits = plain(torch.tensor([IDS])).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(1, torch.tensor(IDS[1:])[:, None])
    scores = engine.forward(IDS)
    assert np.array_equal(scores.logprob, chosen[:, 0].numpy())
    assert np.array_equal(scores.argmax, logprobs.argmax(-1).numpy())
    assert np.array_equal(scores.rank, (logprobs >= chosen).sum(-1).numpy())
    entropy = torch.distributions.Categorical(logits=logits.double()).entropy().numpy()
    assert np.allclose(scores.entropy, entropy, atol=2e-6, rtol=0)  # float32 sum of 512 terms
    assert scores.rank.min() >= 1 and scores.logprob.std() > 1  # the checkpoint's logits are not flat


def test_every_site_fires_in_one_forward_with_its_width_and_dtype(engine):
    _, found = capture(engine)
    assert set(found) == set(engine.facts.sites)
    widths = engine.family.widths(engine.facts)
    for site, tensor in found.items():
        point = site.rsplit(".", 1)[-1]
        rows = len(IDS) - 1 if point == "logprob" else len(IDS)
        assert tuple(tensor.shape) == (rows, widths[point]), site
        assert tensor.dtype == (torch.float32 if point == "logprob" else torch.bfloat16), site


def test_capturing_every_site_changes_no_bit_of_the_scores(engine):
    scores, _ = capture(engine)
    plain = engine.forward(IDS)
    for name in ("logprob", "entropy", "rank", "argmax"):
        assert np.array_equal(getattr(scores, name), getattr(plain, name))


def test_sites_hold_what_the_modules_compute(engine):
    """Independent of the hooks: each value recomputed from transformers' own hidden states and weights."""
    _, found = capture(engine)
    with torch.no_grad():
        hidden = engine.model.model(torch.tensor([IDS]), output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(found["embed"], hidden[0][0])
    assert torch.equal(found["layers.0.resid_mlp"], hidden[1][0])
    assert torch.equal(found["final_norm"], hidden[-1][0])
    layer = engine.model.model.layers[0]
    added = found["layers.0.attn_norm" if "attn_norm" in engine.family.trainer else "layers.0.o"]
    assert torch.equal(found["layers.0.resid_attn"], found["embed"] + added)
    n = next(n for n in range(engine.facts.num_layers) if n not in engine.facts.expert_layers)
    gate, up = found[f"layers.{n}.gate"], found[f"layers.{n}.up"]
    if "geglu" in engine.family.trainer:
        assert torch.equal(found[f"layers.{n}.geglu"], torch.nn.functional.gelu(gate, approximate="tanh") * up)
    else:
        assert torch.equal(found[f"layers.{n}.act"], torch.nn.functional.silu(gate) * up)
    assert torch.equal(found["layers.0.v"][None], layer.self_attn.v_proj(found["layers.0.input_norm"][None]))
    assert torch.equal(
        found["layers.0.q_rope"][0], found["layers.0.q_norm" if engine.facts.qk_norm else "layers.0.q"][0]
    )
    assert not torch.equal(found["layers.0.q_rope"][1], found["layers.0.q"][1])


@pytest.mark.parametrize(("family", "attention"), [(f, a) for f in FAMILIES for a in attentions(f)])
def test_replaying_every_site_from_the_trainers_own_tensors_gives_it_back_to_the_bit(family, attention, tiny):
    engine = TrainerEngine.load(tiny(family), attention=attention)
    _, found = capture(engine)
    before = state(engine)
    for site in engine.facts.sites:
        inputs = [found[name] for name in engine.facts.reads(site)]
        assert torch.equal(engine.replay(site, inputs, token_ids=IDS), found[site]), site
    assert state(engine) == before


def test_replay_uses_the_positions_and_the_inputs_it_is_given(engine):
    positions = list(range(3, 3 + len(IDS)))
    _, found = capture(engine, positions=positions)
    inputs = [found[name] for name in engine.facts.reads("layers.1.k_rope")]
    assert torch.equal(engine.replay("layers.1.k_rope", inputs, positions=positions), found["layers.1.k_rope"])
    assert not torch.equal(engine.replay("layers.1.k_rope", inputs), found["layers.1.k_rope"])
    product = next(s for s in found if s.endswith((".act", ".geglu")))
    gate, up = (found[name].clone() for name in engine.facts.reads(product))
    up[5] = 0
    act = engine.replay(product, [gate, up])
    assert bool((act[5] == 0).all())
    assert torch.equal(act[6], found[product][6])


def test_replay_runs_what_the_model_is_patched_with(llama):
    _, found = capture(llama)
    mlp = llama.model.model.layers[0].mlp
    inputs = [found["layers.0.gate"], found["layers.0.up"]]
    mlp.act_fn, before = torch.nn.GELU(), mlp.act_fn
    try:
        patched = llama.replay("layers.0.act", inputs)
    finally:
        mlp.act_fn = before
    assert torch.equal(patched, torch.nn.functional.gelu(inputs[0]) * inputs[1])


def test_positions_are_those_the_rotary_embedding_received(llama):
    assert llama.forward(IDS).positions.tolist() == list(range(len(IDS)))
    shifted = llama.forward(IDS, positions=range(3, 3 + len(IDS)))
    assert shifted.positions.tolist() == list(range(3, 3 + len(IDS)))

    def shift(_module, args, kwargs):
        return args, {**kwargs, "position_ids": kwargs["position_ids"] + 7}

    handle = llama.model.model.rotary_emb.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        assert llama.forward(IDS).positions[0] == 7
    finally:
        handle.remove()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("site", ["embed", "layers.1.q_rope", "layers.1.resid_mlp", "logits", "logprob"])
def test_everything_is_as_before_when_on_site_raises(site, attention, tiny):
    engine = TrainerEngine.load(tiny("llama"), attention=attention)
    before = state(engine)

    def explode(name, _tensor):
        if name == site:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.forward(IDS, sites=engine.facts.sites, on_site=explode)
    assert state(engine) == before


def test_everything_is_as_before_when_a_module_raises(llama):
    before = state(llama)

    def explode(*_args):
        raise RuntimeError("planted")

    handle = llama.model.model.layers[1].mlp.register_forward_pre_hook(explode)
    try:
        with pytest.raises(RuntimeError, match="planted"):
            capture(llama)
        with pytest.raises(RuntimeError, match="planted"):
            llama.forward_with_embedding_offset(IDS, torch.zeros(len(IDS), 128, dtype=torch.int8))
        x = torch.zeros(4, 128, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="planted"):
            llama.replay("layers.1.resid_mlp", [x, x])
    finally:
        handle.remove()
    assert state(llama) == before


def test_a_model_in_training_mode_goes_back_to_it(llama):
    llama.model.model.layers[0].train()
    try:
        scores = llama.forward(IDS)
        assert llama.model.model.layers[0].mlp.training
    finally:
        llama.model.eval()
    assert np.array_equal(scores.logprob, llama.forward(IDS).logprob)


def test_site_that_never_fires_is_an_error(llama):
    mlp = llama.model.model.layers[1].mlp
    mlp.forward = lambda x: x  # a patch that bypasses gate, up and down
    try:
        with pytest.raises(CaptureError) as caught:
            llama.forward(IDS, sites=["layers.0.act", "layers.1.act"], on_site=lambda *_: None)
    finally:
        del mlp.forward
    assert "layers.1.act" in caught.value.message
    assert "1 of 2 sites fired" in caught.value.detail


def test_unknown_site_is_an_error_that_lists_the_known_ones(llama):
    with pytest.raises(UsageError, match="unknown site"):
        llama.forward(IDS, sites=["layers.0.query"], on_site=lambda *_: None)


def test_replay_refuses_inputs_that_cannot_be_laid_over_one_another(llama):
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="reads 2 sites"):
        llama.replay("layers.0.resid_attn", [x])
    with pytest.raises(NotComparableError, match="4 tokens"):
        llama.replay("layers.0.resid_attn", [x[:3], x])
    with pytest.raises(NotComparableError, match="float32"):
        llama.replay("layers.0.input_norm", [x.float()])


def test_padding_changes_rounding_only(engine):
    sequences = [token_ids(20, seed=1), token_ids(70, seed=2)]
    padded = engine.forward_padded(sequences)
    for ids, scores in zip(sequences, padded, strict=True):
        alone = engine.forward(ids)
        assert len(scores) == len(ids) - 1
        # two bf16 forwards of a 2-layer model with a logit scale of about 10
        assert np.abs(scores.logprob - alone.logprob).mean() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moving_by_ulps_walks_the_ordered_line(dtype):
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0**-126, torch.finfo(dtype).max, torch.inf, torch.nan], dtype=dtype)
    up = move_by_ulps(values, torch.ones(len(values), dtype=torch.int8))
    down = move_by_ulps(values, -torch.ones(len(values), dtype=torch.int8))
    infinity = torch.full_like(values[:5], torch.inf)
    assert torch.equal(up[:5], torch.nextafter(values[:5], infinity))
    assert torch.equal(down[:5], torch.nextafter(values[:5], -infinity))
    assert up[5] == torch.finfo(dtype).max and up[6] == torch.inf and torch.isnan(up[7])
    kept = move_by_ulps(values, torch.zeros(len(values), dtype=torch.int8))
    assert kept.view(torch.uint8).equal(values.view(torch.uint8))


def test_embedding_offset_of_zero_changes_nothing_and_of_one_ulp_does(llama):
    zero = torch.zeros(len(IDS), 128, dtype=torch.int8)
    plain = llama.forward(IDS).logprob
    assert np.array_equal(llama.forward_with_embedding_offset(IDS, zero).logprob, plain)
    one = zero.clone()
    one[40] = 1
    moved = llama.forward_with_embedding_offset(IDS, one).logprob
    assert np.array_equal(moved[:40], plain[:40])
    assert not np.array_equal(moved[40:], plain[40:])
    with pytest.raises(InputError, match="offsets have shape"):
        llama.forward_with_embedding_offset(IDS, zero[1:])


def test_digests_change_with_one_bit_and_name_the_tensor(llama):
    first = llama.weight_digests()
    assert set(first) == {name for name, _ in llama.model.named_parameters()}
    weight = llama.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(torch.int16)[0, 0] ^= 1
        second = llama.weight_digests()
        weight.view(torch.int16)[0, 0] ^= 1
    assert differing_tensors(first, llama.weight_digests()) == []
    assert differing_tensors(first, second) == ["model.layers.1.mlp.up_proj.weight"]
    assert weights_digest(first) != weights_digest(second)


def test_digest_is_over_dtype_shape_and_bytes():
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digests.tensor_digest(tensor) == digests.tensor_digest(tensor.t().contiguous().t())
    assert digests.tensor_digest(tensor) != digests.tensor_digest(tensor.reshape(3, 2))
    assert digests.tensor_digest(tensor) != digests.tensor_digest(tensor.view(torch.int32))


def test_tied_head_is_listed_once_under_the_embedding(tiny):
    names = TrainerEngine.load(tiny("qwen2")).weight_digests()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_wrapping_a_model_in_memory_gives_the_same_scores(llama):
    wrapped = TrainerEngine.wrap(llama.model)
    assert np.array_equal(wrapped.forward(IDS).logprob, llama.forward(IDS).logprob)


def test_manifest_is_json_and_names_what_decides_the_bits(llama):
    import json

    manifest = json.loads(json.dumps(llama.manifest()))
    assert manifest["dtype"] == "bfloat16" and manifest["attention"] == "sdpa" and manifest["device"] == "cpu"
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["numerics"]["num_threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("ids", "message"),
    [([5], "nothing to score"), ([1, 512], "token id 512"), ([1, -1], "token id -1"), ([3] * 513, "past")],
)
def test_token_ids_that_the_model_cannot_take_are_an_error(llama, ids, message):
    with pytest.raises(InputError, match=message):
        llama.forward(ids)


def test_attention_that_ignores_a_soft_cap_is_refused_and_auto_takes_one_that_does_not(tiny):
    with pytest.raises(UsageError, match="ignores attn_logit_softcapping=50") as caught:
        TrainerEngine.load(tiny("gemma2"), attention="sdpa")
    assert "--attention eager" in caught.value.hint
    assert TrainerEngine.load(tiny("gemma2")).manifest()["attention"] == "eager"
    assert TrainerEngine.load(tiny("gemma3")).manifest()["attention"] == "sdpa"


def test_stacked_experts_have_the_digests_of_the_checkpoints_tensors(tiny):
    from safetensors.torch import load_file

    stored = load_file(tiny("qwen3_moe") / "model.safetensors")
    assert sum(".experts." in name for name in stored) == 2 * 8 * 3
    assert TrainerEngine.load(tiny("qwen3_moe")).weight_digests() == {
        name: digests.tensor_digest(tensor) for name, tensor in stored.items()
    }


def test_replayed_experts_are_those_that_the_given_router_logits_choose(tiny):
    engine = TrainerEngine.load(tiny("qwen3_moe"))
    _, found = capture(engine)
    hidden, logits = (found[name] for name in engine.facts.reads("layers.0.expert_out"))
    swapped = logits.clone()
    swapped[7] = logits[7].flip(-1)
    out = engine.replay("layers.0.expert_out", [hidden, swapped])
    kept = torch.arange(len(IDS)) != 7
    assert torch.equal(out[kept], found["layers.0.expert_out"][kept])
    assert not torch.equal(out[7], found["layers.0.expert_out"][7])
