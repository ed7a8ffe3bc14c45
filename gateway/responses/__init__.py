"""Responses API: input items, output items and events, and stored responses.

Called by ``api.responses``; imports ``request`` and the packages below.
"""
