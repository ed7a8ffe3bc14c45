"""``millrace generate`` and ``embed``: a file of requests straight on an engine in this process,
without a bus; and ``quantize``, which makes checkpoints. Called by ``cli.main``. Imports
``engine``, ``engine.quantization`` and ``registry``.
"""
