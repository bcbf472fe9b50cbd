"""Triton kernels for the regions that rpadiag aligns; a leaf that never imports rpadiag."""
