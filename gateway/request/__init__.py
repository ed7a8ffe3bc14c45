"""From a parsed request to an accepted one, and its response."""
