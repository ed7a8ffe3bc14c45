"""What keeps records in a local system: Kafka and telemetry."""
