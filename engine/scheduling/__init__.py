"""Scheduling: the sequences that the next step computes, and the number of tokens of each.

Called by ``engine`` and ``executor``; imports ``kv``, ``sequence`` and ``types``.
"""
