"""Placement: the worker of a job, by its predicted end at each worker and their prefix caches.

Pure. ``dispatch`` uses it. It imports ``fleet`` and ``jobs``.
"""
