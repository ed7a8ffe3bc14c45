"""Groups of ranks that compute one model, on CPUs or with a device each, one process per rank.

Rank 0 is the engine's process and plans the steps; the other ranks follow it.
"""
