"""The Triton kernels and their launchers. Imported on first use, so that the package loads without Triton."""
