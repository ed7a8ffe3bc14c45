"""Endpoints that answer with one vector or one number per input."""
