"""Bridge from the outbox on NATS to Kafka."""
