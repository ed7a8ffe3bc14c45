"""Scanners of calls that are still being written, one for each format.

Called by the parser; imports argument types and nothing else of the registry.
"""
