"""What the bus costs beside another engine's own server, and how long a killed one is missed. Run
as ``python -m benchmarks.engines``. Imports ``benchmarks.peers`` for its loads and its client."""
