"""The front door: HTTP, SSE and WebSocket on one side, the bus on the other."""
