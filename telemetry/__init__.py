"""Records on their way to ClickHouse (outbox, Kafka, sink), and queries of them."""
