"""Every kernel for GPUs, compiled for a Hopper GPU on a machine that has none."""
