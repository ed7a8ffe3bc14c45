"""Weights of few bits: what they are in any checkpoint's layout, and how they are made and read.

The loader and the engine call it; it imports `schemas`, `registry` and the kernels alone, but for
`making`, which writes checkpoints and is above the engine.
"""
