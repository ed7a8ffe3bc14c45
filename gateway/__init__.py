"""Gateway: HTTP, SSE and WebSocket endpoints in front of the message bus.

``app`` has the endpoints, ``core`` their shared parts, ``server`` the sockets. Run as ``python -m
millrace.gateway``. Imports ``bus``, ``registry``, ``runtime`` and ``schemas``. A package here
imports only packages after it in this list: api, batches, responses and rendering, request, streams
and sessions, tools and tenancy, transport.
"""
