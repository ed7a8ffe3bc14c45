"""Clients of the servers under load, and what their answers say. ``bench.load`` runs them; they
import ``bench.prompts`` and ``bench.settings``.
"""
