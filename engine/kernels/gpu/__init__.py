"""Kernels for CUDA devices, in Triton, and references of them in plain torch."""
