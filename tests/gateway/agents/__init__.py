"""Recorded requests of agents and frameworks: tests/clients records them, cut to a few KB."""
