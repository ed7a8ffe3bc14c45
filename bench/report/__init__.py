"""From samples to a report: JSON, a table, a page, a comparison."""
