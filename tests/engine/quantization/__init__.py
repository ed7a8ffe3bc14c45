"""Quantized weights, and checkpoints that have them."""
