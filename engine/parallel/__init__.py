"""Groups of ranks that compute one model together."""
