"""Grammars: compiled, followed, and turned into masks of tokens. Called by ``engine``, ``executor``
and ``output_processor``; imports ``sequence`` and the registry."""
