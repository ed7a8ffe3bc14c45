"""Kernels: the operations of a decoder step that torch has no single fast call for."""
