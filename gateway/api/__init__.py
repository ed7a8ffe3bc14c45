"""Endpoints, a file for each family of them.

``gateway.app`` routes to them; they may import every room but ``openapi``. Chat, completions,
responses and messages share ``generations``, embeddings and scores ``pooled``; a WebSocket is
``socket``, and what is kept of answers ``kept``.
"""
