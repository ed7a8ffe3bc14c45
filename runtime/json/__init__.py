"""JSON: how much there is in a body, why a payload is none, and JSON on one line."""
