"""Text to token ids and back, and the threads that long texts need."""
