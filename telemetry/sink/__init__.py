"""Sink from Kafka to ClickHouse, in batches."""
