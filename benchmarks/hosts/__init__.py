"""``python -m benchmarks.hosts``: a system over three hosts whose links fail."""
