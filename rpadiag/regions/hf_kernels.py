"""Contracts through the Hugging Face ``kernels`` library: the ecosystem's own switch for layer implementations.

    from kernels import Mode, kernelize, use_kernel_mapping

    with use_kernel_mapping(kernel_mapping("vllm-eager", device="cuda"), inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cuda")

The library replaces one module, or one function, at a time. Two of the regions fit: the RMSNorm alone, so only contracts
that read the sum as it was rounded, and RoPE with tables as the model hands them on, so only those with an lp
cache. SwiGLU has no such place in transformers' MLPs. :func:`rpadiag.align` knows no such limits. The library keeps one
RoPE function per family for all models in the process, and has no undo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rpadiag.contracts import Contract, RmsNormContract, RopeContract
from rpadiag.errors import UsageError, unknown_name
from rpadiag.regions.align import ContractLike, resolve
from rpadiag.regions.ops import RmsNormOperation, RopeOperation

LAYER_NAMES = {"rmsnorm": "RMSNorm", "rope": "rotary_pos_emb"}


@dataclass(frozen=True, kw_only=True)
class ContractRepository:
    """What the library calls a repository: gives the layer class for one contract. Hashable, as it is memoised."""

    contract: Contract
    kernels: str = "auto"

    @property
    def layer_name(self) -> str:
        """Name under which transformers marks the layers that this replaces."""
        return LAYER_NAMES[self.contract.region]

    def load(self) -> type[nn.Module]:
        """A stateless module class whose ``forward`` follows the contract."""
        if isinstance(self.contract, RmsNormContract):
            return _norm_layer(RmsNormOperation(self.contract, self.kernels))
        return _rope_layer(RopeOperation(self.contract, self.kernels))

    def __str__(self) -> str:
        return f"rpadiag contract {self.contract.name()}"


def kernel_mapping(
    contract: ContractLike = "vllm-eager",
    *,
    device: str = "cuda",
    regions: Sequence[str] = ("rmsnorm", "rope"),
    kernels: str = "auto",
) -> dict[str, dict[str, Any]]:
    """Mapping for ``kernels.register_kernel_mapping`` or ``use_kernel_mapping``.

    Errors: UsageError for another region, and for a contract that one module alone cannot follow.
    """
    preset = resolve(contract)
    mapping: dict[str, dict[str, Any]] = {}
    for region in regions:
        if region not in LAYER_NAMES:
            raise unknown_name("region of the kernels library", region, LAYER_NAMES)
        if region not in preset.regions:
            raise UsageError(f"contract {preset.name} says nothing about region {region}")
        chosen = preset.regions[region]
        _check(chosen)
        mapping[LAYER_NAMES[region]] = {device: ContractRepository(contract=chosen, kernels=kernels)}
    return mapping


def _check(contract: Contract) -> None:
    if isinstance(contract, RmsNormContract) and (contract.sum == "fp32" or contract.variance == "unrounded"):
        reason = "the norm reads the residual sum before it is rounded, and a norm module is handed the rounded one"
    elif isinstance(contract, RopeContract) and contract.cache == "fp32":
        reason = "cos and sin stay in fp32, and the function is handed the rounded ones"
    else:
        return
    raise UsageError(
        f"the kernels library cannot follow {contract.name()}",
        detail=reason,
        hint="use rpadiag.align, which changes the layers around it too",
    )


def _norm_layer(operation: RmsNormOperation) -> type[nn.Module]:
    class ContractRMSNorm(nn.Module):
        can_torch_compile = True
        has_backward = True
        weight: Tensor
        variance_epsilon: float

        def forward(self, hidden_states: Tensor) -> Tensor:
            return operation(hidden_states, self.weight, None, self.variance_epsilon)  # type: ignore[return-value]

    return ContractRMSNorm


def _rope_layer(operation: RopeOperation) -> type[nn.Module]:
    class ContractRope(nn.Module):
        can_torch_compile = True
        has_backward = True

        def forward(
            self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
        ) -> tuple[Tensor, Tensor]:
            half = cos.shape[-1] // 2
            tables = (table[..., :half].unsqueeze(unsqueeze_dim) for table in (cos, sin))
            return operation.pair(q, k, *tables)

    return ContractRope
