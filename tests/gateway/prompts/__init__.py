"""Prompts that do not fit, and what of them the model does not read."""
