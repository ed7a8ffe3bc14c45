"""From the outcomes of a run to a report: JSON, a table, a page. Called by ``cli.simulate``;
imports ``bench.report`` for its plots, and the rest of ``simulation``.
"""
