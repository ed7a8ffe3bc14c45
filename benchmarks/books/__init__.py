"""Check that all figures of one load are the same in every report."""
