"""Steps on a device that computes by itself: inputs, graphs, sampling, memory."""
