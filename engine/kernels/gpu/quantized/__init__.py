"""Products with weights of few bits: how they lie in memory, how rows are rounded, the products."""
