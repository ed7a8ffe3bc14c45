"""Clients of Kafka, its security, and a cluster in memory."""
