"""``python -m benchmarks.gateway_soak``: clients that behave badly, and what they leave behind."""
