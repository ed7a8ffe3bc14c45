"""What becomes of errors: of a connection, and of a long-lived task."""
