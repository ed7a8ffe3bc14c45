"""Blocks of the KV cache: who holds them, who shares them, where they go."""
