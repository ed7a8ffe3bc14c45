"""What the journal keeps: large objects, and whether there is room for more."""
