"""Steps on an asynchronous device: inputs, graphs, sampling and memory.

``step.runners`` calls this package, which imports models, kernels and the engine's packages from
``step.runner`` down.
"""
