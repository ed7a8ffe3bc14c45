"""Runners of a model on one device: a CPU or a CUDA device."""
