"""Measurements of the system: ``python -m benchmarks.<name>``. Not part of the tests.

A file or a folder with a ``__main__`` is a command. ``support`` has their common code. Benchmarks
may import every package, and the server fixtures of the tests.
"""
