"""Runner for CPUs: computes each step synchronously, in torch or by compiled kernels.

The host chooses every token. ``step.runners`` calls this package, which imports models, kernels and
the engine's packages from ``step.runner`` down.
"""
