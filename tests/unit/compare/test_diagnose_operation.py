"""One operation of a decoder, in FP32 as in the control and in BF16: mistakes are named with their solved parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rpadiag.compare.diagnose_operation import diagnose_operation

T, WIDTH, D = 96, 256, 64
POSITIONS = torch.arange(T)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotated(x: Tensor, inv: Tensor, positions: Tensor = POSITIONS) -> Tensor:
    angle = (positions.double()[:, None] * inv.double())[:, None]
    h = x.double().unflatten(-1, (-1, D))
    one, two = h[..., : D // 2], h[..., D // 2 :]
    c, s = angle.cos(), angle.sin()
    return torch.cat((one * c - two * s, two * c + one * s), -1).flatten(-2).to(x.dtype)


def inv_freq(theta: float = 1e4) -> Tensor:
    return 1 / theta ** (torch.arange(0, D, 2) / D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_wrong_rope_base_is_solved(dtype: torch.dtype) -> None:
    q = normal(1, T, WIDTH, dtype=dtype)
    (found,) = diagnose_operation(
        "layers.3.q_rope", rotated(q, inv_freq()), rotated(q, inv_freq(5e5)), {"layers.3.q": q},
        head_dim=D, positions=POSITIONS,
    )  # fmt: skip
    assert found.code == "rope-base" and found.region == "rope" and found.site == "layers.3.q_rope"
    assert found.numbers["theta_a"] == 1e4 and found.numbers["theta_b"] == 5e5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_shifted_positions_are_solved(dtype: torch.dtype) -> None:
    k = normal(2, T, WIDTH, dtype=dtype)
    (found,) = diagnose_operation(
        "layers.0.k_rope", rotated(k, inv_freq()), rotated(k, inv_freq(), POSITIONS + 3), {"layers.0.k_norm": k},
        head_dim=D, positions=POSITIONS,
    )  # fmt: skip
    assert found.code == "position-offset" and found.numbers["offset"] == 3


def test_frequencies_in_bf16_grow_with_position() -> None:
    q = normal(3, T, WIDTH)
    (found,) = diagnose_operation(
        "layers.0.q_rope", rotated(q, inv_freq()), rotated(q, inv_freq().bfloat16()), {"layers.0.q": q},
        head_dim=D, positions=POSITIONS,
    )  # fmt: skip
    assert found.code == "angles" and "grows with position" in found.text


@pytest.mark.parametrize(("eps", "other"), [(1e-6, 1e-5), (1e-5, 1e-6)])
def test_wrong_epsilon_is_solved_in_fp32_where_bf16_hides_it(eps: float, other: float) -> None:
    x, w = normal(4, T, WIDTH) * 0.3, normal(5, WIDTH).abs() + 0.5
    outs = [x * (x.square().mean(1, keepdim=True) + e).rsqrt() * w for e in (eps, other)]
    (found,) = diagnose_operation(
        "layers.1.post_norm", *outs, {"layers.1.resid_attn": x}, head_dim=D, weight=w
    )  # fmt: skip
    assert found.code == "epsilon"
    assert found.numbers["eps_a"] == pytest.approx(eps, rel=0.05)
    assert found.numbers["eps_b"] == pytest.approx(other, rel=0.05)


def test_epsilon_is_solved_without_the_weight() -> None:
    x = normal(6, T, WIDTH) * 0.1
    outs = [x * (x.square().mean(1, keepdim=True) + e).rsqrt() for e in (1e-6, 1e-4)]
    (found,) = diagnose_operation("final_norm", *outs, {"layers.1.resid_mlp": x}, head_dim=D)
    assert found.code == "epsilon" and found.numbers["eps_b"] == pytest.approx(1e-4, rel=0.05)


def test_epsilon_is_solved_where_the_norm_has_a_weight_that_is_not_known() -> None:
    x, w = normal(6, T, WIDTH) * torch.logspace(-3, 0, T)[:, None], normal(5, WIDTH).abs() + 0.5
    outs = [x * (x.square().mean(1, keepdim=True) + e).rsqrt() * w for e in (1e-6, 1e-5)]
    (found,) = diagnose_operation("layers.0.input_norm", *outs, {"embed": x}, head_dim=D)
    assert found.code == "epsilon"
    assert found.numbers["eps_a"] == pytest.approx(1e-6, rel=0.1)
    assert found.numbers["eps_b"] == pytest.approx(1e-5, rel=0.1)


def test_per_head_norm_epsilon_is_solved() -> None:
    q = (normal(7, T, WIDTH) * 0.05).bfloat16()
    heads = q.float().unflatten(-1, (-1, D))
    outs = [(heads * (heads.square().mean(-1, keepdim=True) + e).rsqrt()).flatten(-2).bfloat16() for e in (1e-6, 1e-3)]
    (found,) = diagnose_operation("layers.0.q_norm", *outs, {"layers.0.q": q}, head_dim=D)
    assert found.region == "qk_norm" and found.code == "epsilon"


def test_window_is_told_from_token_major_attention() -> None:
    q, k, v = (normal(8 + i, T, 128, dtype=torch.bfloat16) for i in range(3))
    i = torch.arange(T)

    def out(window: int) -> Tensor:
        seen = (i[None] <= i[:, None]) & (i[:, None] - i[None] < window)
        h = [t.double().unflatten(-1, (-1, D)).movedim(1, 0) for t in (q, k, v)]
        s = (h[0] @ h[1].mT / D**0.5).masked_fill(~seen, float("-inf"))
        return (s.softmax(-1) @ h[2]).movedim(0, 1).flatten(-2).bfloat16()

    reads = {"layers.0.q_rope": q, "layers.0.k_rope": k, "layers.0.v": v}
    (found,) = diagnose_operation("layers.0.attn", out(32), out(33), reads, head_dim=D)
    assert "one extra key at distance 32" in found.text


def test_another_activation_is_named() -> None:
    gate, up = normal(11, T, 128), normal(12, T, 128)
    silu, gelu = torch.nn.functional.silu(gate) * up, torch.nn.functional.gelu(gate) * up
    (found,) = diagnose_operation("layers.0.act", silu, gelu, {"layers.0.gate": gate, "layers.0.up": up}, head_dim=D)
    assert found.code == "formula" and "gelu(gate) * up" in found.text


def test_residual_added_twice_is_solved() -> None:
    x, r = normal(13, T, WIDTH), normal(14, T, WIDTH)
    reads = {"layers.0.resid_mlp": r, "layers.1.o": x}
    (found,) = diagnose_operation("layers.1.resid_attn", r + x, 2 * r + x, reads, head_dim=D)
    assert "B is 1 * x + 2 * residual" in found.text


def test_equal_outputs_give_nothing() -> None:
    x = normal(15, T, WIDTH)
    assert diagnose_operation("layers.0.post_norm", x, x.clone(), {"layers.0.resid_attn": x}, head_dim=D) == []
