"""Tools of a request: parsed for each endpoint, and chosen for the model.

Called by parsers; imports schemas, tool formats and the decoder of bodies.
"""
