"""What the kernels compute, in plain torch on any device."""
