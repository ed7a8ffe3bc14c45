"""``millrace bench``: its arguments, and the calls of ``bench`` that they ask for. Called by
``cli.main``. Imports ``bench``.
"""
