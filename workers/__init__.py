"""A worker: a bus side in asyncio and an engine in a process of its own."""
