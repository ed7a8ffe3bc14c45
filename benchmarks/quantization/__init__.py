"""Quantized weights: speed beside llama.cpp and beside bfloat16, and what they cost in quality."""
