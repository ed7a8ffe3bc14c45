"""Benchmarks of the way of a record, from the outbox by Kafka to ClickHouse, and of its queries:
``python -m benchmarks.telemetry.<name>``. They import ``telemetry`` and ``benchmarks.support``.
"""
