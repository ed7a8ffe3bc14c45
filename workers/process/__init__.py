"""The engine's process, its keeper, and the wire between it and the bus side."""
