"""From samples to a report: JSON, tables, a page, a comparison. Called by ``bench.runner``, the
command line and ``simulation.report``, whose page has the same plots. Imports ``bench.clients``.
"""
