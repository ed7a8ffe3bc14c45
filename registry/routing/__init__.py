"""Which model answers a request that left the choice open. Pure."""
