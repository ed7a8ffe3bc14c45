"""Workers as the scheduler sees them, and how many of them there should be."""
