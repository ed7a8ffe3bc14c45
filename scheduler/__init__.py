"""Late binding of jobs to workers: pull what has room, place it, keep its lease meanwhile."""
