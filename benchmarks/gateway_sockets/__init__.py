"""``python -m benchmarks.gateway_sockets``: many WebSockets on one gateway, from few processes."""
