"""Kernels for CUDA devices, in Triton, and plain-torch references of them with the same interface."""
