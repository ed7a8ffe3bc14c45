"""KV cache blocks: allocation, sharing, and their tiers of memory.

Called by the planner, ``executor`` and ``output_processor``; imports ``sequence``, ``types`` and
kernels.
"""
