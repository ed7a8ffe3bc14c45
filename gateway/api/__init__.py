"""Endpoints, a file for each family of them.

``gateway.app`` routes to them; they may import every room but ``openapi``. Chat, completions and
responses share ``generations``; a WebSocket is ``socket``.
"""
