"""Demo model: its FAQ, its training and its evaluation."""
