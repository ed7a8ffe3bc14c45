"""Engine on real public models."""
