"""Bodies of the kernels in Triton's language, which differs from Python."""
