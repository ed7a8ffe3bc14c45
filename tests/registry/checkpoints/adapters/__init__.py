"""Adapters before they are loaded."""
