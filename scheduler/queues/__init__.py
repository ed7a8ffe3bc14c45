"""Jobs that wait: what each tenant queue has, in which order jobs are served, and when their turn
will come. Pure: the time is passed in. The stages use it; it imports ``fleet`` and ``jobs``."""
