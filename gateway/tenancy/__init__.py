"""Who calls, by which key, and what the limits leave to them.

Called by every endpoint and by ``request``; imports ``transport``.
"""
