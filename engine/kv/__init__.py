"""Blocks of the KV cache: who holds them, who shares them, where they go. Called by the planner,
``executor`` and ``output_processor``; imports ``sequence``, ``types`` and kernels."""
