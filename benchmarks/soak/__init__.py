"""Soak of the engine: mixed requests on a small pool, and invariants of answers."""
