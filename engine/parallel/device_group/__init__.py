"""A model over several devices, a rank and its process for each: rank 0 is the engine's own and
plans, the others are told what it tells its device. Called by ``runners``; imports ``device`` and
``group``."""
