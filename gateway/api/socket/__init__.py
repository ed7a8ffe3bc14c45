"""Endpoint ``/v1/ws``: many generations on one socket."""
