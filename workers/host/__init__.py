"""The bus side of a worker: a dispatch is checked, becomes a generation, runs in the engine, is
published as frames, and ends. Called by ``workers.__main__``; imports the bus, the engine's process
and its types, never torch."""
