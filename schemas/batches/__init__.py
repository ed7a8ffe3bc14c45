"""Batches of requests, with their input and output files."""
