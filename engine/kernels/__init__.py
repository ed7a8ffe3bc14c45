"""Kernels: the operations of a decoder step that torch has no single fast call for, and their
interface. Called by models and the engine's runners; imports nothing of the other two."""
