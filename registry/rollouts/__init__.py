"""Versions of a model: which one answers, and when a rollout goes on, ends or turns back. Pure: no
clock, no I/O. Gateways and schedulers choose by it, schedulers decide; it imports ``schemas``
only."""
