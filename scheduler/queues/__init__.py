"""Jobs that wait: in which order they are served, and when their turn will come."""
