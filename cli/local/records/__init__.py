"""Kafka and telemetry, the processes that keep the records of a local system."""
