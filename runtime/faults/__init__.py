"""Errors of connections and failures of long-lived tasks."""
