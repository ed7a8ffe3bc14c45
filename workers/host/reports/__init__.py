"""Reports of a worker about itself: heartbeats and samples, prefix blocks, completions.

Called by ``worker`` and ``requests``; imports the bus, schemas and the engine's types only.
"""
