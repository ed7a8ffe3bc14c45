"""Clients of the servers under load, and parsers of their answers.

``bench.load`` runs them; they import ``bench.prompts`` and ``bench.settings``.
"""
