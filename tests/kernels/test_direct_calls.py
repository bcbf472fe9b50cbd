"""Calls that go past the dispatcher: the same bits, and whoever wants to see the operator still does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import rpadiag_kernels
import torch
from kernel_data import angles, num_mismatches, values
from rpadiag_kernels import operators
from rpadiag_kernels.operators import operator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

EPS = 1e-6
NAMES = ("rmsnorm", "rmsnorm alone", "rope", "rope of two", "swiglu")


def inputs() -> list[Tensor]:
    x, r = (values(2, 3, 64, dtype=torch.bfloat16, seed=s, spread=0).requires_grad_() for s in (1, 2))
    return [x, r, values(64, dtype=torch.bfloat16, seed=3, spread=0).requires_grad_()]


def outputs(name: str, x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    cos, sin = (t[:, None] for t in angles(3, 8))
    x_heads, r_heads = (t.view(2, 3, 4, 16) for t in (x, r))
    called: dict[str, Callable[[], Any]] = {
        "rmsnorm": lambda: rpadiag_kernels.rmsnorm(x, w, eps=EPS, residual=r, sum="fp32", variance="unrounded"),
        "rmsnorm alone": lambda: rpadiag_kernels.rmsnorm(x, w, eps=EPS),
        "rope": lambda: rpadiag_kernels.rope(x_heads, cos, sin),
        "rope of two": lambda: rpadiag_kernels.rope(x_heads, cos, sin, k=r_heads[:, :, :1]),
        "swiglu": lambda: rpadiag_kernels.swiglu(x, r),
    }
    found = called[name]()
    return found if isinstance(found, tuple) else (found,)


def results(name: str) -> list[Tensor]:
    """Outputs, and gradients of their squares with respect to what they depend on."""
    tensors = inputs()
    found = outputs(name, *tensors)
    loss = sum((t.float().square().sum() for t in found), torch.zeros(()))
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [t.detach() for t in (*found, *gradients) if t is not None]


class Seen(TorchDispatchMode):
    """Names of the operators that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_past_the_dispatcher_has_the_bits_of_one_through_it(name: str) -> None:
    direct = results(name)
    with Seen() as seen:
        dispatched = results(name)
    region = name.split()[0]
    assert {f"rpadiag.{region}.default", f"rpadiag.{region}_backward.default"} <= set(seen.names)
    assert len(direct) == len(dispatched)
    assert all(num_mismatches(a, b) == 0 for a, b in zip(direct, dispatched, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gradient_the_bits_are_the_same(name: str) -> None:
    wanted = results(name)
    with torch.no_grad():
        found = outputs(name, *inputs())
    assert not any(t.requires_grad for t in found)
    with torch.inference_mode():
        inference = outputs(name, *inputs())
    for group in (found, inference):
        assert all(num_mismatches(a, b) == 0 for a, b in zip(group, wanted, strict=False))


@pytest.mark.parametrize("name", ["rmsnorm", "rope of two", "swiglu"])
def test_results_may_be_changed_in_place(name: str) -> None:
    tensors = inputs()
    for result in outputs(name, *tensors):
        result.add_(1)
        assert result.grad_fn is not None
    with torch.no_grad():
        found = outputs(name, *tensors)
    for result in found:
        result.add_(tensors[0].view(result.shape) if result.numel() == tensors[0].numel() else 1)


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_see_the_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t.detach()) for t in inputs()]
        cos, sin = (mode.from_tensor(t[:, None]) for t in angles(3, 8))
        heads = fakes[0].view(2, 3, 4, 16)
    calls: dict[str, Callable[[], Any]] = {  # outside of the mode: only the tensors' type tells
        "rmsnorm": lambda: rpadiag_kernels.rmsnorm(fakes[0], fakes[2], eps=EPS, residual=fakes[1])[0],
        "rmsnorm alone": lambda: rpadiag_kernels.rmsnorm(fakes[0], fakes[2], eps=EPS),
        "rope": lambda: rpadiag_kernels.rope(heads, cos, sin),
        "rope of two": lambda: rpadiag_kernels.rope(heads, cos, sin, k=heads)[0],
        "swiglu": lambda: rpadiag_kernels.swiglu(fakes[0], fakes[1]),
    }
    dispatched: list[str] = []
    dispatch = operators.Operator._dispatch
    monkeypatch.setattr(
        operators.Operator, "_dispatch", lambda op, args: (dispatched.append(op.name), dispatch(op, args))[1]
    )
    found = calls[name]()
    assert type(found).__name__ == "FakeTensor"
    assert found.numel() == fakes[0].numel()
    assert dispatched == [f"rpadiag::{name.split()[0]}"]


def test_tensor_subclasses_see_the_operator() -> None:
    class Seeing(Tensor):
        seen: tuple[str, ...] = ()

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen += (str(func),)
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    x, r, _ = (t.detach().as_subclass(Seeing) for t in inputs())
    rpadiag_kernels.swiglu(x, r)
    assert "rpadiag.swiglu.default" in Seeing.seen


def test_make_fx_and_functional_transforms_see_the_operator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x, r, _ = (t.detach() for t in inputs())
    graph = make_fx(lambda a, b: rpadiag_kernels.swiglu(a, b))(x, r)
    assert "rpadiag.swiglu.default" in {str(node.target) for node in graph.graph.nodes}
    mapped = torch.vmap(rpadiag_kernels.swiglu)(x, r)
    assert num_mismatches(mapped, rpadiag_kernels.swiglu(x, r)) == 0


def test_a_gradient_of_a_gradient_is_warned_about() -> None:
    x, r, w = inputs()
    y = rpadiag_kernels.rmsnorm(x, w, eps=EPS, residual=r)[0]
    (gradient,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    assert gradient.grad_fn is not None
    with pytest.warns(UserWarning, match="autograd"):
        gradient.float().sum().backward()


def test_other_devices_go_through_the_dispatcher() -> None:
    x = torch.empty(2, 64, dtype=torch.bfloat16, device="meta")
    assert rpadiag_kernels.swiglu(x, x).device.type == "meta"


def test_an_operator_without_a_gradient_formula_says_so() -> None:
    @operator("rpadiag_test::twice")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(2, requires_grad=True)
    assert torch.equal(twice(x.detach()), torch.full((2,), 2.0))
    with pytest.warns(UserWarning, match="autograd"):
        twice(x).sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_gradients_is_each_of_them(name: str) -> None:
    tensors = inputs()
    (y, *_) = outputs(name, *tensors)
    dys = values(3, *y.shape, dtype=torch.bfloat16, seed=4, spread=0)
    kept = [
        t for t in tensors if torch.autograd.grad(y, t, dys[0], allow_unused=True, retain_graph=True)[0] is not None
    ]
    batch = torch.autograd.grad(y, kept, dys, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, kept, dy, retain_graph=True) for dy in dys]
    for found, *wanted in zip(batch, *each, strict=True):
        assert num_mismatches(found, torch.stack(wanted)) == 0


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_jit_trace_holds_the_operator_and_runs_on_other_sizes(grad: bool) -> None:
    x, r, w = (t.detach().requires_grad_(grad) for t in inputs())

    def norm(a: Tensor, b: Tensor, c: Tensor) -> Any:
        return rpadiag_kernels.rmsnorm(a, c, eps=EPS, residual=b)

    traced = torch.jit.trace(norm, (x, r, w))
    assert "rpadiag::rmsnorm" in str(traced.graph)
    for n in (1, 2):
        found, wanted = (f(x[:n, :2], r[:n, :2], w) for f in (traced, norm))
        assert all(num_mismatches(a, b) == 0 for a, b in zip(found, wanted, strict=True))


def jvp_of_a_vmap(a: Tensor, b: Tensor, _: Tensor) -> Any:
    return torch.func.jvp(lambda t: torch.vmap(rpadiag_kernels.swiglu)(t, b), (a,), (a,))


TANGENTS: dict[str, Callable[..., Any]] = {
    "swiglu": lambda a, b, w: rpadiag_kernels.swiglu(dual(a), b),
    "up": lambda a, b, w: rpadiag_kernels.swiglu(a, dual(b)),
    "weight": lambda a, b, w: rpadiag_kernels.rmsnorm(a, dual(w), eps=EPS),
    "residual": lambda a, b, w: rpadiag_kernels.rmsnorm(a, w, eps=EPS, residual=dual(b)),
    "rope": lambda a, b, w: rpadiag_kernels.rope(dual(a).view(2, 3, 4, 16), *(t[:, None] for t in angles(3, 8))),
    "jvp": lambda a, b, w: torch.func.jvp(lambda t: rpadiag_kernels.swiglu(t, b), (a,), (a,)),
    "jvp of a vmap": jvp_of_a_vmap,
    "gradient": lambda a, b, w: torch.autograd.grad(rpadiag_kernels.swiglu(a, a), a, dual(b)),
}


def dual(x: Tensor) -> Tensor:
    return torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tangent_is_refused_and_never_left_out(name: str, mode: Callable[[], Any]) -> None:
    for wanted in (False, True):
        x, r, w = (t.detach().requires_grad_(wanted or name == "gradient") for t in inputs())
        # torch.func.jvp enters its own level
        with contextlib.nullcontext() if "jvp" in name else torch.autograd.forward_ad.dual_level():
            with contextlib.nullcontext() if name == "gradient" else mode():
                with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
                    TANGENTS[name](x, r, w)


def test_tensors_without_a_tangent_and_custom_derivatives_pass_in_forward_mode() -> None:
    x, r, _ = (t.detach() for t in inputs())

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return rpadiag_kernels.swiglu(a, r)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return 3 * tangent

    wanted = rpadiag_kernels.swiglu(x, r)
    with torch.autograd.forward_ad.dual_level():
        found = torch.autograd.forward_ad.unpack_dual(Tripled.apply(dual(x)))
        assert num_mismatches(rpadiag_kernels.swiglu(x, r), wanted) == 0
    assert num_mismatches(found.primal, wanted) == 0
    assert torch.equal(found.tangent, torch.full_like(x, 3))
    for swiglu in (rpadiag_kernels.swiglu, torch.vmap(rpadiag_kernels.swiglu)):
        _, tangent = torch.func.jvp(lambda t, f=swiglu: t * f(x, r), (r,), (torch.ones_like(r),))
        assert num_mismatches(tangent, wanted) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_names_the_operator(name: str) -> None:
    with torch.profiler.profile() as profile:
        results(name)
    region = name.split()[0]
    assert {f"rpadiag::{region}", f"rpadiag::{region}_backward"} <= {event.name for event in profile.events()}


def test_a_node_of_the_graph_names_the_operator() -> None:
    x, r, _ = inputs()
    assert rpadiag_kernels.swiglu(x, r).grad_fn.name() == "rpadiag_swigluBackward"


def test_a_lazily_negated_tensor_has_the_bits_of_its_values() -> None:
    x, r, w = (t.detach() for t in inputs())
    lazy = torch._neg_view(-x)
    assert lazy.is_neg()
    assert num_mismatches(rpadiag_kernels.swiglu(lazy, r), rpadiag_kernels.swiglu(x, r)) == 0
    assert num_mismatches(rpadiag_kernels.rmsnorm(lazy, w, eps=EPS), rpadiag_kernels.rmsnorm(x, w, eps=EPS)) == 0
    assert rpadiag_kernels.ulp_stats(lazy, x)["num_differing"] == 0


def test_eps_may_be_a_number_of_another_kind() -> None:
    x, _, w = inputs()
    wanted = rpadiag_kernels.rmsnorm(x, w, eps=2**-20)
    for eps in (torch.tensor(2**-20), np.float32(2**-20)):
        assert num_mismatches(rpadiag_kernels.rmsnorm(x, w, eps=eps), wanted) == 0  # type: ignore[arg-type]


def test_a_torch_that_cannot_be_asked_who_watches_gets_every_call_dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = results("rmsnorm")
    assert operators.CAN_ASK
    monkeypatch.setattr(operators, "CAN_ASK", False)
    assert outputs("rmsnorm", *inputs())[0].grad_fn.name().startswith("GeneratedBackwardFor_rpadiag_rmsnorm")
    assert all(num_mismatches(a, b) == 0 for a, b in zip(results("rmsnorm"), wanted, strict=True))
