"""Step loop: build a batch from sequences, compute it, and return tokens."""
