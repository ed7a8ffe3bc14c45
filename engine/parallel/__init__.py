"""Groups of ranks, one process each, that compute one model: on CPUs or with a device each. Rank 0
is the engine's own and plans; the others do as it says."""
