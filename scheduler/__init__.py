"""The scheduler: pulls jobs when a worker has capacity for them, places each and follows it to its
end. ``python -m millrace.scheduler`` runs it, and others meet it on the bus only; it imports ``bus``,
``registry``, ``runtime`` and ``schemas``. A job goes down the rooms ``intake``, ``dispatch``,
``queues`` and ``placement``, ``fleet``, ``jobs``, each of which imports those after it."""
