"""What the files of a checkpoint say, checked before weights are read."""
