"""Connections: HTTP, who may connect, and how bytes are written."""
