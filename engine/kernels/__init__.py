"""Kernels: operations of a decoder step for which torch has no single fast call.

Models and the engine's runners call this package, which imports neither.
"""
