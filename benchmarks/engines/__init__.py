"""Cost of the bus in front of another engine's server, and the gap after a kill of that server.

Run as ``python -m benchmarks.engines``. Uses the loads and the client of ``benchmarks.peers``.
"""
