"""Rotary embedding in Triton. Shape legend: B batch, T tokens, H heads, D head size, R rotary size.

Contract: the formula, rounding points and dtypes of ``rpadiag_kernels.rope.reference_forward``; no reductions; fma
only where the contract's fma or fused axis says so, then always. One program turns all heads of one token.
Proof: tests/kernels/test_gpu_bits.py (on a GPU), tests/kernels/test_interpreter.py (on a CPU).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rpadiag_kernels.axes import LP_CODES
from rpadiag_kernels.gpu.device import INTERPRETING, fma, fma_lp, negate, on_device, store_lp, to_lp
from rpadiag_kernels.rope import products_of

MAX_PAIRS = 4096  # pairs of one program; more heads than that take several programs
PAIRS_PER_WARP = 512


@triton.jit
def _pair(
    a, c, b, s, PRODUCTS: tl.constexpr, FUSED: tl.constexpr, TRUNCATE: tl.constexpr, LP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """a*c + b*s as lp. FUSED: 0 no fma, 1 the product with c, 2 the product with s."""
    if PRODUCTS == 0:
        return store_lp(to_lp(a * c, LP, INTERPRET) + to_lp(b * s, LP, INTERPRET), LP, TRUNCATE, INTERPRET)
    elif PRODUCTS == 2:
        if FUSED == 1:
            return fma_lp(a, c, to_lp(b * s, LP, INTERPRET), LP, TRUNCATE, INTERPRET)
        else:
            return fma_lp(b, s, to_lp(a * c, LP, INTERPRET), LP, TRUNCATE, INTERPRET)
    elif FUSED == 1:
        return store_lp(fma(a, c, b * s, INTERPRET), LP, TRUNCATE, INTERPRET)
    elif FUSED == 2:
        return store_lp(fma(b, s, a * c, INTERPRET), LP, TRUNCATE, INTERPRET)
    else:
        return store_lp(a * c + b * s, LP, TRUNCATE, INTERPRET)


@triton.jit
def _turn_heads(
    x_ptr, out_ptr, c, s, first_head, H, HALF, D, x_head, x_col, out_head, out_col,
    LP: tl.constexpr, BACKWARD: tl.constexpr, PRODUCTS: tl.constexpr, FUSED_1: tl.constexpr, FUSED_2: tl.constexpr,
    INTERLEAVED: tl.constexpr, STORE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Turn heads first_head .. first_head + HEADS - 1 of the token that the pointers stand at."""
    heads = (first_head + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS).to(tl.int64)[None, :]
        mask = (heads < H) & (cols < 2 * HALF)
        both = tl.load(x_ptr + heads * x_head + cols * x_col, mask=mask, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
    else:
        cols = tl.arange(0, PAIRS).to(tl.int64)[None, :]
        mask = (heads < H) & (cols < HALF)
        x1 = tl.load(x_ptr + heads * x_head + cols * x_col, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + heads * x_head + (cols + HALF) * x_col, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        o1 = _pair(x1, c, x2, s, PRODUCTS, FUSED_1, STORE == 1, LP, INTERPRET)
        o2 = _pair(x2, c, negate(x1), s, PRODUCTS, FUSED_2, STORE == 1, LP, INTERPRET)
    else:
        o1 = _pair(x1, c, negate(x2), s, PRODUCTS, FUSED_1, STORE == 1, LP, INTERPRET)
        o2 = _pair(x2, c, x1, s, PRODUCTS, FUSED_2, STORE == 1, LP, INTERPRET)
    if INTERLEAVED:
        joined = tl.reshape(tl.join(o1, o2), [HEADS, 2 * PAIRS])
        tl.store(out_ptr + heads * out_head + cols * out_col, joined, mask=mask)
    else:
        tl.store(out_ptr + heads * out_head + cols * out_col, o1, mask=mask)
        tl.store(out_ptr + heads * out_head + (cols + HALF) * out_col, o2, mask=mask)
    if REST > 0:
        rest = (2 * HALF + tl.arange(0, REST)).to(tl.int64)[None, :]
        keep = (heads < H) & (rest < D)
        passed = tl.load(x_ptr + heads * x_head + rest * x_col, mask=keep)
        tl.store(out_ptr + heads * out_head + rest * out_col, passed, mask=keep)


@triton.jit
def _table(pointer, cols, stride, HALF, LP: tl.constexpr, CACHE: tl.constexpr, INTERPRET: tl.constexpr):
    """One token's row of cos or sin, float32 [1, PAIRS]."""
    row = tl.load(pointer + cols * stride, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
    return to_lp(row, LP, INTERPRET) if CACHE == 0 else row


@triton.jit
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, T, HQ, HK, HALF, D,
    q_batch, q_token, q_head, q_col, qo_batch, qo_token, qo_head, qo_col,
    k_batch, k_token, k_head, k_col, ko_batch, ko_token, ko_head, ko_col,
    c_batch, c_token, c_col, s_batch, s_token, s_col,
    LP: tl.constexpr, CACHE: tl.constexpr, HAS_K: tl.constexpr, BACKWARD: tl.constexpr,
    PRODUCTS: tl.constexpr, FUSED_1: tl.constexpr, FUSED_2: tl.constexpr, INTERLEAVED: tl.constexpr,
    STORE: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    batch, token = index // T, index % T
    pairs = tl.arange(0, PAIRS)
    c = _table(cos_ptr + batch * c_batch + token * c_token, pairs, c_col, HALF, LP, CACHE, INTERPRET)
    s = _table(sin_ptr + batch * s_batch + token * s_token, pairs, s_col, HALF, LP, CACHE, INTERPRET)
    group = tl.program_id(1)
    _turn_heads(
        q_ptr + batch * q_batch + token * q_token, q_out_ptr + batch * qo_batch + token * qo_token, c, s,
        group * Q_HEADS, HQ, HALF, D, q_head, q_col, qo_head, qo_col,
        LP, BACKWARD, PRODUCTS, FUSED_1, FUSED_2, INTERLEAVED, STORE, Q_HEADS, PAIRS, REST, INTERPRET,
    )  # fmt: skip
    if HAS_K:
        _turn_heads(
            k_ptr + batch * k_batch + token * k_token, k_out_ptr + batch * ko_batch + token * ko_token, c, s,
            group * K_HEADS, HK, HALF, D, k_head, k_col, ko_head, ko_col,
            LP, BACKWARD, PRODUCTS, FUSED_1, FUSED_2, INTERLEAVED, STORE, K_HEADS, PAIRS, REST, INTERPRET,
        )  # fmt: skip


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor | None, codes: dict[str, int],
    *, backward: bool,
) -> None:  # fmt: skip
    """Turn ``q`` [B, T, HQ, D] and ``k`` [B, T, HK, D] into ``q_out`` and ``k_out``; cos, sin [B, T, R/2]. Any strides."""
    num_batches, num_tokens, q_heads, head_size = q.shape
    half = cos.shape[-1]
    if q.numel() == 0 and (k is None or k.numel() == 0):
        return
    k_in, k_to = (q, q_out) if k is None or k_out is None else (k, k_out)
    pairs = triton.next_power_of_2(half)
    groups = triton.cdiv(triton.next_power_of_2(max(q_heads, k_in.shape[2])) * pairs, MAX_PAIRS)
    q_tile, k_tile = (triton.next_power_of_2(triton.cdiv(t.shape[2], groups)) for t in (q, k_in))
    rest = head_size - 2 * half
    products, (fused_1, fused_2) = products_of(codes, backward=backward)
    with on_device(q):
        _rotate[(num_batches * num_tokens, groups)](
            q, k_in, cos, sin, q_out, k_to, num_tokens, q_heads, k_in.shape[2], half, head_size,
            *q.stride(), *q_out.stride(), *k_in.stride(), *k_to.stride(), *cos.stride(), *sin.stride(),
            LP=LP_CODES[q.dtype], CACHE=codes["cache"], HAS_K=k is not None, BACKWARD=backward,
            PRODUCTS=products, FUSED_1=fused_1, FUSED_2=fused_2, INTERLEAVED=codes["layout"] == 1,
            STORE=0 if backward else codes["store"],
            Q_HEADS=q_tile, K_HEADS=k_tile, PAIRS=pairs, REST=triton.next_power_of_2(rest) if rest else 0,
            INTERPRET=INTERPRETING,
            num_warps=min(8, max(1, q_tile * pairs // PAIRS_PER_WARP)), enable_fp_fusion=False,
        )  # fmt: skip
