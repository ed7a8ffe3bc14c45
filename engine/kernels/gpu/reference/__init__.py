"""References of the kernels in plain torch, for any device."""
