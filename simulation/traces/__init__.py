"""The requests of a load: read from a file, drawn, and written. Called by ``cli.simulate`` and
``simulation.world``; imports ``schemas`` and the spreads of ``bench``.
"""
