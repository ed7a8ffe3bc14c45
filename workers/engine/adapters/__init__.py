"""Which adapters are in memory, and who waits for one."""
