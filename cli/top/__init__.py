"""``millrace top``: snapshots of a running system (``source``), as tables (``view``), on a screen
(``live``). Called by ``cli.main``. Imports ``bus``, and from ``gateway`` who is alive.
"""
