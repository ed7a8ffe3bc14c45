"""``millrace generate`` and ``embed``: a file of requests straight on an engine in this process,
without a bus. Called by ``cli.main``. Imports ``workers.engine`` and ``registry``.
"""
