"""Kernels for CUDA devices in Triton, and their references in plain torch."""
