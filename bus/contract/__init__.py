"""The contract of the bus for programs that are not ours: an AsyncAPI document."""
