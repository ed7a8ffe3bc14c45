"""What every process needs and no bus is: settings, logs, clocks, metrics, tracing, Redis, TLS."""
