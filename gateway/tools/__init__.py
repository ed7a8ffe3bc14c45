"""Tools that the gateway runs itself: the catalogue, the runner, and which addresses it may call.

Called by ``request.tool_loop`` and ``api.tools``; imports no other room.
"""
