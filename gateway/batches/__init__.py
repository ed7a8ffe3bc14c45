"""Batches of requests, from the input file to the output files.

``gateway.server`` runs ``runner``; ``api.files`` and ``api.batches`` read the stores. Imports
``core``, ``rendering`` and the packages below.
"""
