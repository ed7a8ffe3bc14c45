"""``millrace publish`` and ``result``: jobs published directly on the bus, and their frames.

Imports ``bus``.
"""
