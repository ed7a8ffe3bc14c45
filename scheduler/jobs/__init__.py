"""What a job is to the scheduler that answers for it, and how it ends."""
