"""Reports from samples: JSON, tables, a page, a comparison.

Used by ``bench.runner``, the command line and ``simulation.report``, whose page has the same plots.
Imports ``bench.clients``.
"""
