"""Clients of Kafka, their security, and a cluster in memory."""
