"""Measurements that anyone can run: ``python -m benchmarks.<name>``. Never part of the tests.

A file here is a command; so is a folder with a ``__main__``. ``support`` has their common code.
Benchmarks may import every package, and the server fixtures of the tests.
"""
