"""From Kafka to ClickHouse, in batches."""
