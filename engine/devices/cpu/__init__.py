"""The runner that computes each step at once, in torch or by compiled kernels on a CPU, and leaves
every token to the host to choose. Called by ``step.runners``; imports models, kernels, and the
engine's rooms from ``step.runner`` down."""
