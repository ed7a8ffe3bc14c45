"""Programs of the repository that are not in the installed package."""
