"""``millrace top``: snapshots of a running system (``source``), as tables (``view``), on a screen
(``live``).

Imports ``bus``, and from ``gateway`` the list of live workers.
"""
