"""Quantizer: makes a quantized checkpoint on disk from a wide one, layer by layer.

`cli.offline.quantize` calls it. It imports the decoder, and the engine's operations in plain torch
for the calibration.
"""
