"""Registry of models: their catalogue, their files, and conversion between text and tokens."""
