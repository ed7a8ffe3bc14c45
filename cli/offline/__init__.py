"""``millrace generate`` and ``embed``: a file of requests on ``millrace.engine.LLM``, without a
bus. ``millrace quantize``: makes checkpoints.

Imports ``engine`` and ``registry``.
"""
