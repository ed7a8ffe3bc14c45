"""From a wide checkpoint to a quantized one on disk, layer by layer.

`cli.offline.quantize` calls it; it imports the decoder, and the engine's operations in plain torch
for what a calibration computes.
"""
