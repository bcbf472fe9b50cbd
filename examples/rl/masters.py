"""AdamW on FP32 masters of low-precision weights; clipping and loss scaling inside, the same in every arm.

An update of a learning rate of 1e-5 is far below half a ULP of most BF16 weights and would vanish in place. So masters are updated,
and weights are masters rounded to ``stored`` (the rollout engine's dtype) and then held in the trainer's dtype: exact where that is wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

GROWTH_INTERVAL = 200  # steps without overflow after which the loss scale doubles
LARGEST_SCALE = 2.0**24


class MasterAdamW(torch.optim.Optimizer):
    """params: the model's. stored: dtype that the other stack holds. loss_scale: first scale; None does not scale.

    Gradients are taken to FP32, divided by the scale and clipped to ``max_grad_norm`` (0 does not clip). A step with a gradient that
    is not finite is skipped, whatever the dtype, and counted; with a scale it also halves it. ``norms`` are the norms of the
    steps since ``take_norms``, before clipping; not finite where skipped.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        max_grad_norm: float,
        stored: torch.dtype,
        loss_scale: float | None = None,
    ) -> None:
        super().__init__(list(params), {"lr": lr})
        self.weights = [p for group in self.param_groups for p in group["params"]]
        self.masters = [p.detach().to(torch.float32).clone() for p in self.weights]
        self.inner = torch.optim.AdamW(self.masters, lr=lr, betas=betas, eps=eps, weight_decay=0.0)
        self.max_grad_norm, self.stored = max_grad_norm, stored
        self.scale, self.good, self.skipped = loss_scale, 0, 0
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.to(torch.float32) / (self.scale or 1.0)
        norm = torch.nn.utils.get_total_norm([m.grad for m in self.masters if m.grad is not None])
        self.norms.append(float(norm))
        if not math.isfinite(self.norms[-1]):
            self._skip()
            return
        if self.max_grad_norm:
            factor = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
            for master in self.masters:
                if master.grad is not None:
                    master.grad.mul_(factor)
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        self._write_weights()
        self._grow()

    def take_norms(self) -> list[float]:
        taken, self.norms = self.norms, []
        return taken

    def _write_weights(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master.to(self.stored))
            master.grad = None

    def _skip(self) -> None:
        self.skipped, self.good = self.skipped + 1, 0
        if self.scale is not None:
            self.scale = max(1.0, self.scale / 2)
        for master in self.masters:
            master.grad = None

    def _grow(self) -> None:
        self.good += 1
        if self.scale is not None and self.good % GROWTH_INTERVAL == 0:
            self.scale = min(LARGEST_SCALE, self.scale * 2)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        own = {"scale": self.scale, "good": self.good, "skipped": self.skipped, "lr": self.param_groups[0]["lr"]}
        return {"masters": self.masters, "inner": self.inner.state_dict(), "own": own}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bit for bit: the base class would cast FP32 state to the weights' dtype."""
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        self.inner.load_state_dict(state["inner"])
        own = state["own"]
        self.scale, self.good, self.skipped = own["scale"], own["good"], own["skipped"]
        self.param_groups[0]["lr"] = own["lr"]
        self._write_weights()


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.scale, None


def scaled(loss: torch.Tensor, scale: float | None) -> torch.Tensor:
    """The same loss, whose gradients come multiplied by ``scale``."""
    return loss if scale is None else _ScaledGradient.apply(loss, scale)
