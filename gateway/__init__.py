"""The front door: HTTP, SSE and WebSocket on one side, the bus on the other.

``app`` has the endpoints, ``core`` the parts that they share, ``server`` the sockets. Started as
``python -m millrace.gateway``; imports ``bus``, ``registry``, ``runtime`` and ``schemas``. A room imports
those below it: api, batches, responses and rendering, request, streams and sessions, tools and
tenancy, transport.
"""
