"""Threads: the engine's compute threads, its task threads, and the bell that wakes it."""
