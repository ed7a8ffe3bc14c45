"""KV cache blocks in an object store that all workers of a kind share.

Blocks are written from host memory, and read into it as a tier of ``BlockArrivals``.
``block_objects`` has the store's side, ``object_cache`` the engine's.
"""
