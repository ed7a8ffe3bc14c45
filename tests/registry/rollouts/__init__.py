"""Versions of a model and how traffic moves among them."""
