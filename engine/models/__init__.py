"""Model code: one configurable decoder and the loader of its weights.

The engine's runners call this package; it imports kernels and the registry's checkpoints.
"""
