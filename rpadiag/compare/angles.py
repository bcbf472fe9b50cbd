"""Rotation angles read back from what a rotary embedding did, and the base that explains them.

A pair of columns (x1, x2) turned into (o1, o2) is a complex number z = (o1 + i o2) / (x1 + i x2) = exp(i * position * frequency).
Shape legend: T tokens, H heads, D head size, P = D/2 pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("neox", "interleaved")
ROUND_BASES = tuple(float(m * 10**e) for e in range(2, 9) for m in (1, 1.5, 2, 2.5, 4, 5, 8))


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """z [T, P] averaged over heads, complex128. defect: rms deviation of |z| from its mean: 0 for the right layout."""

    layout: str
    z: Tensor
    gain: float
    defect: float


@dataclass(frozen=True, kw_only=True)
class Base:
    """``frequency_i = scale * theta ** (-2 i / D)``; residual: rms of ln(frequency) about that line; error: of ln(theta)."""

    theta: float
    scale: float
    residual: float
    error: float
    num_pairs: int

    @property
    def round_theta(self) -> float:
        """The round number that the fit cannot be told from, or theta itself."""
        return round_base(self.theta, within=min(0.02, max(5 * self.error, 1e-3)))


def pairs(x: Tensor, layout: str) -> Tensor:
    """[T, H, P] complex128 of x [T, H, D]."""
    x = x.double()
    half = x.shape[-1] // 2
    if layout == "neox":
        return torch.complex(x[..., :half], x[..., half : 2 * half])
    return torch.complex(x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])


def turn(x: Tensor, out: Tensor, layout: str) -> Turn:
    """The rotation that takes x to out, both [T, H, D], if they are paired by ``layout``."""
    a, o = pairs(x, layout), pairs(out, layout)
    power = a.abs().square().sum(1)
    z = (o * a.conj()).sum(1) / power.clamp_min(1e-300)
    size_in, size_out = a.abs(), o.abs()
    live = size_in > 0.2 * size_in.square().mean().sqrt()
    ratio = size_out[live] / size_in[live]
    gain = float(ratio.median()) if ratio.numel() else 1.0
    defect = float((ratio / gain - 1).square().mean().sqrt()) if ratio.numel() and gain > 0 else math.inf
    return Turn(layout=layout, z=z, gain=gain, defect=defect)


def best_turn(x: Tensor, out: Tensor) -> Turn:
    """The layout that keeps the length of every pair."""
    return min((turn(x, out, layout) for layout in LAYOUTS), key=lambda t: t.defect)


def frequencies(z: Tensor, positions: Tensor) -> Tensor:
    """Frequency of each pair, float64 [P]; NaN where the positions are too far apart to follow the angle.

    Sorted by position, steps whose angle stays below pi are added up (Kay's estimate: the mean angle of z[t+1] conj(z[t])),
    then refined by fitting the unwrapped angle against the position.
    """
    order = torch.argsort(positions)
    p = positions[order].double()
    z = z[order]
    step = p[1:] - p[:-1]
    usual = float(step[step > 0].median()) if bool((step > 0).any()) else 0.0
    if usual == 0:
        return torch.full((z.shape[1],), math.nan, dtype=torch.float64)
    same = step == usual
    forward = (z[1:] * z[:-1].conj())[same].sum(0)
    coarse = torch.angle(forward) / usual
    coarse = torch.where(coarse < 0, coarse + 2 * math.pi / usual, coarse)  # frequencies are positive, below one turn
    centred = p - p[0]
    residual = torch.angle(z * z[:1].conj() * torch.exp(-1j * centred[:, None] * coarse[None, :]))
    weight = centred / centred.square().sum().clamp_min(1e-300)
    refined = coarse + (residual * weight[:, None]).sum(0)
    smooth = torch.angle(z).isfinite().all(0) & (residual.abs().amax(0) < 1.5)
    refined = torch.where(smooth, refined, coarse)
    seen = refined * float(p[-1] - p[0]) > 0.03  # less angle than this over all positions is lost in rounding
    return _unaliased(torch.where((refined * usual < 0.9 * math.pi) & seen, refined, math.nan))


def _unaliased(freq: Tensor) -> Tensor:
    """Frequencies fall with the index; going up from the lowest, the first that does not rise has wrapped around."""
    out = torch.full_like(freq, math.nan)
    last = 0.0
    for i in range(len(freq) - 1, -1, -1):
        value = float(freq[i])
        if math.isnan(value):
            if last:
                break
            continue
        if value <= last:
            break
        out[i] = last = value
    return out


def fit_base(freq: Tensor, dim: int) -> Base | None:
    """theta and scale of frequencies [P] (NaN entries are left out); None with fewer than 3."""
    i = torch.arange(len(freq), dtype=torch.float64)
    ok = freq.isfinite() & (freq > 0)
    if int(ok.sum()) < 3:
        return None
    x, y = (2 * i / dim)[ok], freq[ok].double().log()
    xm, ym = x.mean(), y.mean()
    slope = float(((x - xm) * (y - ym)).sum() / (x - xm).square().sum())
    at_zero = float(ym - slope * xm)
    residual = float((y - at_zero - slope * x).square().mean().sqrt())
    error = residual / float((x - xm).square().sum().sqrt())
    return Base(
        theta=math.exp(-slope), scale=math.exp(at_zero), residual=residual, error=error, num_pairs=int(ok.sum())
    )


def round_base(theta: float, *, within: float = 0.02) -> float:
    """The round number near ``theta`` (10000, 500000, 1e6, ...), or theta itself."""
    near = min(ROUND_BASES, key=lambda b: abs(math.log(b / theta)))
    return near if abs(math.log(near / theta)) < within else theta


def inverse_frequencies(dim: int, theta: float, scale: float = 1.0) -> Tensor:
    """float32 [dim/2], computed as transformers and vLLM do."""
    inv = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    return inv if scale == 1.0 else inv * scale


def table_frequencies(cos: Tensor, positions: Tensor) -> Tensor:
    """Frequencies [P] from a cosine table [T, P] alone: each column up to where its angle would pass pi."""
    order = torch.argsort(positions)
    p, c = positions[order].double(), cos[order].double().clamp(-1, 1)
    out = torch.full((cos.shape[1],), math.nan, dtype=torch.float64)
    for j in range(cos.shape[1]):
        column = c[:, j]
        falling = (column[1:] <= column[:-1]).long().cumprod(0)
        last = int(falling.sum())
        inside = torch.nonzero((column[: last + 1] > -0.95) & (column[: last + 1] < 0.995))[:, 0]
        if len(inside) and last >= 1:
            k = int(inside[-1])
            if k >= 2 or float(p[k]) <= 3:
                out[j] = torch.acos(column[k]) / p[k]
    return out
