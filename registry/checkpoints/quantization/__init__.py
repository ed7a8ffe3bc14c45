"""Quantized weights of a checkpoint, by its config.json: the modules and their storage."""
