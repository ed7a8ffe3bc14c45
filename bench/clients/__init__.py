"""Clients of the servers under load, and what their answers say."""
