"""Batches of requests, from their file to their output files.

``gateway.server`` runs ``runner``; ``api.files`` and ``api.batches`` read the stores. Imports
``core``, ``rendering`` and what is below.
"""
