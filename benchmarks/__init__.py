"""Measurements that anyone can run: ``python -m benchmarks.<name>``. Never part of the tests.

A file here is a command; so is a folder with a ``__main__``. What several use is in ``support``.
They may import every package and what the tests start servers with.
"""
