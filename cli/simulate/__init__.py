"""``millrace simulate``: its arguments, its trace, and its calls of ``simulation``.

Imports ``simulation``, ``bench``, and ``analytics`` for the stored history.
"""
