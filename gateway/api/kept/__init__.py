"""Stored answers and conversations, and their endpoints."""
