"""Sampler: logits processors, the top-k/top-p filter, and random draws.

Called by the output processor and the runners; imports ``batch``, ``sequence``, ``types`` and
kernels.
"""
