"""``python -m benchmarks.soak``: mixed requests on a small pool, and what must hold of answers."""
