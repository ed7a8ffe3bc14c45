"""The bodies of the kernels: Triton's language, which is not quite Python."""
