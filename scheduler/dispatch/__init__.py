"""One model's jobs from the fair queue to their end: sent, watched, migrated, requeued, finished.
``intake`` hands jobs to a ``Dispatcher``; it imports ``queues``, ``placement``, ``fleet`` and
``jobs``."""
