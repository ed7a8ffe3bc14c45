"""Records on their way to ClickHouse (outbox, Kafka, sink), and the questions asked of them."""
