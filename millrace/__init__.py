"""Installed package: all packages of Millrace under one name.

The packages lie at the top of the repository and are linked here: see
docs/decisions/2026-11-25-one-namespace.md.
"""
