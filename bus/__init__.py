"""NATS and Kafka: subjects, codec, jobs and leases, frame streams, worker directory, outbox."""
