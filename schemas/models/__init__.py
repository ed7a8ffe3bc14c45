"""Adapters, model versions and rollouts between versions."""
