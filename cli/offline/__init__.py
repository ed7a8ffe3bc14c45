"""Commands that run an engine in their own process, without a bus."""
