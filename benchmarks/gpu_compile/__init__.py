"""Compilation of every GPU kernel for a Hopper GPU, on a machine without one."""
