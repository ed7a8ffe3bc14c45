"""Report of a run's outcomes: JSON, a table, a page.

``cli.simulate`` calls it. It imports ``bench.report`` for its plots, and the rest of
``simulation``.
"""
