"""What is installed: every package of Millrace under one name that is its own.

The packages lie at the top of the repository, and here are links to them: see
docs/decisions/2026-11-25-one-namespace.md.
"""
