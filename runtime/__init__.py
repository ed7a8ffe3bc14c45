"""Base of every process, without a bus: settings, logs, clocks, metrics, tracing, Redis, TLS."""
