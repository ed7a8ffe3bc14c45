"""Which workers there are, what they are called, and how many are wanted."""
