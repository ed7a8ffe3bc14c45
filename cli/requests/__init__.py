"""``millrace publish`` and ``result``: jobs put straight on the bus, and the frames that answer
them. Called by ``cli.main``. Imports ``bus``.
"""
