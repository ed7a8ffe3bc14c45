"""Quantized weights: read from any checkpoint's layout, made by rounding, and multiplied.

The loader, the engine and the quantizer call this package; it imports `schemas`, `registry` and the
kernels.
"""
