"""Chaos benchmark: loads, their clients, faults, and the rounds of both."""
