"""Measurements that anyone can run: ``python -m benchmarks.<name>``. Never part of the tests."""
