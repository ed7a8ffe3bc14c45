"""Engines that others wrote, each a server of its own that the worker's bus side drives over HTTP:
``server_engine`` is what they share, a ``Dialect`` how one of them is started, asked and read.
Called by ``workers.__main__``. Imports the engine's types only, never the engine."""
