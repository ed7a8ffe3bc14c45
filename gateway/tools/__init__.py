"""Tools that the gateway runs itself: the catalogue, the runner, and the addresses it may call.

Called by ``request.tool_loop`` and ``api.tools``; imports no other package of the gateway.
"""
