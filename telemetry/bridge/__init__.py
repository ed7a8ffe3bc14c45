"""From the outbox on NATS to Kafka."""
