"""``python -m benchmarks.chaos``: loads, their clients, faults, and the rounds of both."""
