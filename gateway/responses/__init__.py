"""The Responses API: items in, items and events out."""
