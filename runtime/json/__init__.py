"""JSON: size of a body, faults of a payload, and JSON on one line."""
