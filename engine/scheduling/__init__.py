"""Which sequences the next step computes, and how many tokens of each. Called by ``engine`` and
``executor``; imports ``kv``, ``sequence`` and ``types``."""
