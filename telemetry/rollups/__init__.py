"""Usage by the minute and its cost."""
