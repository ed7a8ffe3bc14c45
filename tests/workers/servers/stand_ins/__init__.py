"""Stand-ins for inference servers, in the test process or in its children."""
