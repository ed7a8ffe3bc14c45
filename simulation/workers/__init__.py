"""Simulated workers in virtual time."""
