"""``millrace generate`` and ``embed``: a file of requests on ``millrace.engine.LLM``, without bus;
and ``quantize``, which makes checkpoints. Called by ``cli.main``. Imports ``engine`` and
``registry``.
"""
