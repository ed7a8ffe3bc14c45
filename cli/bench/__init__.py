"""``millrace bench``: its arguments, and the calls of ``bench`` that they ask for. Called by
``cli.main``; ``simulate`` takes the type of an argument from it. Imports ``bench``.
"""
