"""Routing of requests that leave the choice of the model open. Pure."""
