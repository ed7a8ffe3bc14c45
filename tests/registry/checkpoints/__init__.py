"""What is read of a checkpoint before its weights are."""
