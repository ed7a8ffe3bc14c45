"""Grammars: compiled, followed, and turned into token masks.

Called by ``engine``, ``executor`` and ``output_processor``; imports ``sequence`` and the registry.
"""
