"""Third-party engines: servers that the worker's bus side drives over HTTP.

``server_engine`` is the shared part. A ``Dialect`` starts one kind of server, sends it requests and
reads its answers. Called by ``workers.__main__``. Imports the engine's types only, never the
engine.
"""
