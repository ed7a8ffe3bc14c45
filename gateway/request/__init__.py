"""From a parsed request to its response: ``submitter`` is the way, with ``job_maker``,
``admission`` and ``model_choice``; then ``response_reader`` reads the streams, ``response_stream``
minds the client and ``tool_loop`` runs tools.

``resuming`` leads to a response that runs already. Called by the endpoints and by batches; imports
``sessions``, ``streams`` and what is below.
"""
