"""Endpoints, one file for each family.

``gateway.app`` routes to them. They may import every package but ``openapi``. Chat, completions,
responses and messages share ``generations``; embeddings and scores share ``pooled``. ``socket`` has
the WebSocket, ``kept`` the stored answers.
"""
