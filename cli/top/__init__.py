"""`millrace top`."""
