"""Requests of a load: read from a file, drawn, and written.

``cli.simulate`` and ``simulation.world`` call it. It imports ``schemas`` and the spreads of
``bench``.
"""
