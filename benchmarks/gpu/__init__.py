"""Engine on a GPU, from single kernels to whole loads: ``python -m benchmarks.gpu``."""
