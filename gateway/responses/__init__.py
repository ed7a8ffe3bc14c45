"""The Responses API: items in, items and events out, and what is kept of them.

Called by ``api.responses``; imports ``request`` and what is below.
"""
