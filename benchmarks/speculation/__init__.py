"""``python -m benchmarks.speculation``: what proposed tokens save, and that they change none."""
