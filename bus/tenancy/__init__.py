"""Limits of tenants and API keys, counted in Redis by gateways and schedulers."""
