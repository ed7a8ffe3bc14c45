"""The engine: continuous batching over a paged KV cache. No bus and no asyncio in here."""
