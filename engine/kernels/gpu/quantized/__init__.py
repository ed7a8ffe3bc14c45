"""Products with weights of few bits: layout in memory, rounding of rows, and kernels."""
