"""Alerts that the system reports itself, without Prometheus: rules, states, and start times.

Gateways and telemetry use it. It imports ``runtime`` only.
"""
