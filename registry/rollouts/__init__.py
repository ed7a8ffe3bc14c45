"""Versions of a model, and rollouts that move requests from one version to another.

Pure: no clock, no I/O. Gateways and schedulers choose versions by it; schedulers decide on
rollouts. It imports ``schemas`` only.
"""
