"""Batches of requests, from their file to their answers."""
