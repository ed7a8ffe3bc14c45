"""A system with a worker double that answers batches."""
