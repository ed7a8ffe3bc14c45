"""Usage by the minute, and what it costs."""
