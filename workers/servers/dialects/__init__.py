"""Dialects, a module for each kind of inference server.

Called by ``servers.kinds``.
"""
