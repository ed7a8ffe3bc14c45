"""Weights of few bits: what they are in any checkpoint's layout, and how they are made and read.

The loader, the engine and the quantizer call it; it imports `schemas`, `registry` and the kernels.
"""
