"""Worker: a bus side in asyncio and an engine in its own process.

Started as ``python -m workers``. Other services reach a worker only by the bus. Imports bus,
registry, runtime and schemas.
"""
