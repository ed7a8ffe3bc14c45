"""Quantized weights: speed beside llama.cpp and beside bfloat16, and loss of quality."""
