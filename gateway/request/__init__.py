"""Path of a parsed request to its response: ``submitter`` runs it, with ``job_maker``,
``admission`` and ``model_choice``; then ``response_reader`` reads the streams, ``response_stream``
serves the client and ``tool_loop`` runs tools.

``resuming`` finds a running response. Called by the endpoints and by batches; imports ``sessions``,
``streams`` and the packages below.
"""
