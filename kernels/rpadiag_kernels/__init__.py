"""Triton kernels for the regions that rpadiag aligns; a leaf that never imports rpadiag.

Every operation takes its rounding contract as keyword strings (``axes.AXES``), is a ``torch.library`` operator with a
fake implementation and autograd, and runs a PyTorch reference on the CPU. Triton is imported at the first CUDA call.
"""

from rpadiag_kernels.rmsnorm import rmsnorm
from rpadiag_kernels.rope import rope
from rpadiag_kernels.swiglu import swiglu
from rpadiag_kernels.ulp import ulp_stats

__all__ = ["rmsnorm", "rope", "swiglu", "ulp_stats"]
