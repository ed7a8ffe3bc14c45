"""The sampler: logits processors, the top-k/top-p filter, and how a token is drawn. Called by the
output processor and the runners; imports ``batch``, ``sequence``, ``types`` and kernels."""
