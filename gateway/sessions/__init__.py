"""Sessions: conversations stored in Redis between requests, cut to a window and summarised.

Called by ``request`` before jobs are made and at the end of a response; imports ``tenancy`` and
``transport``.
"""
