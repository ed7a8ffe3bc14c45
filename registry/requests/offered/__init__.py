"""The tools of a request: read as each endpoint spells them, and which of them the model is told
of. Called by parsers; imports schemas, tool formats and the decoder of bodies."""
