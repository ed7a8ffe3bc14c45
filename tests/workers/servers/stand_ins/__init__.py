"""Servers of the test process, or of one that it starts, in the place of an engine's."""
