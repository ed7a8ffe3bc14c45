"""Responses in the shapes of OpenAI's endpoints."""
