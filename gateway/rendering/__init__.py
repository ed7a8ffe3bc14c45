"""Responses in the shapes of OpenAI's endpoints: chat, text completions, embeddings.

Called by the endpoints and by batches; imports ``request`` and the packages below.
"""
