"""The engine: continuous batching over a paged KV cache. No bus and no asyncio in here. Called by
``process.loop``; imports models, kernels, registry and schemas."""
