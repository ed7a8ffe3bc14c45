"""What adapters cost: see ``python -m benchmarks.adapters --help``."""
