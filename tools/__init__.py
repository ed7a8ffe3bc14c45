"""Programs of the repository that the installed package does not have."""
