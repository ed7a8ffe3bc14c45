"""Joules: a device's counter, and its sharing among requests. Called by ``reports``, ``endings``
and ``generations``; imports settings only."""
