"""Steps on a device that computes by itself: inputs, graphs, sampling, memory. Called by
``step.runners``; imports models, kernels, and the engine's rooms from ``step.runner`` down."""
