"""Alerts that the system tells of itself, without Prometheus: their rules, how each of them stands,
and since when. Gateways and the telemetry process use it; it imports ``runtime`` only."""
