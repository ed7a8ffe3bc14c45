"""Grammars: compiled, followed, and turned into masks of tokens."""
