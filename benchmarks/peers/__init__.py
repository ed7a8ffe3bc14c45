"""Millrace beside other engines: ``python -m benchmarks.peers``."""
