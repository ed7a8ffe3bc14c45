"""Which models there are, where their files lie, and how text becomes tokens and back."""
