"""From what happened to a report."""
