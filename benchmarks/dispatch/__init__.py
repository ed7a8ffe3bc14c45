"""``python -m benchmarks.dispatch``: workers that only acknowledge, and what reaches them when."""
