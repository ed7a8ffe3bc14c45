"""Bus side of a worker: check a dispatch, run it as a generation in the engine, publish its frames,
end it.

Called by ``workers.__main__``; imports the bus, the engine's process and its types, never torch.
"""
