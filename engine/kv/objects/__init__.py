"""Blocks of the KV cache in an object store that all workers of a kind share: written behind host
memory, read into it as a tier of ``Arrivals``. ``opening`` makes the store's side of it,
``object_cache`` the engine's."""
