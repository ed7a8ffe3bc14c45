"""Which worker a job goes to: the predicted end of it at each, and what their caches have. Pure.
``dispatch`` uses it; it imports ``fleet`` and ``jobs``."""
