"""Kafka on this machine."""
