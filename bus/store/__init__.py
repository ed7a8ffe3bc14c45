"""Large objects in the journal, and the watch for free space."""
