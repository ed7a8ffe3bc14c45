"""Checkpoint files, read and checked before weights are loaded."""
