"""The queues as a whole: which models are served, how much waits, what is shed, which model a job
without one gets. The scheduler starts it; it may import every other room."""
