"""Offline requests: run straight on an engine in this process, without a bus, for ``engine.llm``.

Imports the registry for prompts, chat templates and text. It uses four methods of the engine.
"""
