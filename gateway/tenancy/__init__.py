"""Tenants: callers, their keys, and the limits of both.

Called by every endpoint and by ``request``; imports ``transport``.
"""
