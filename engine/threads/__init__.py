"""Threads: how many the engine computes with, those beside it, and how they wake it."""
