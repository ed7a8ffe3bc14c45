"""The bus side of a worker: requests from their dispatch to their end."""
