"""Tokenizers, detokenizers, and the threads for long texts."""
