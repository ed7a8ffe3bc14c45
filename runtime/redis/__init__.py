"""A client of Redis as configured, and one connection that never makes its callers wait long."""
