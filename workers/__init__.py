"""A worker: a bus side in asyncio and an engine in a process of its own. Started as ``python -m
workers``; other services reach it by the bus only. Imports bus, registry, runtime and schemas."""
