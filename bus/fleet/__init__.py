"""Fleet: workers, their names, their adapters and versions, and the desired number."""
