"""``millrace simulate``: its arguments, where its trace comes from, and the calls of
``simulation``. Called by ``cli.main``. Imports ``simulation``, ``bench``, and ``analytics`` for
the stored history.
"""
