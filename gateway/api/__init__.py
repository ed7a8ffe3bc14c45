"""Endpoints, a file for each family of them."""
