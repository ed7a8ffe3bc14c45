"""The engine: continuous batching over a paged KV cache. It knows no bus, no broker and no asyncio.
Imports schemas, registry and runtime; ``millrace.workers`` runs it behind the bus."""
