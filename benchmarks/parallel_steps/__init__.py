"""Steps of big models over several devices, derived: ``python -m benchmarks.parallel_steps``."""
