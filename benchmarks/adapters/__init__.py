"""Cost of adapters: see ``python -m benchmarks.adapters --help``."""
