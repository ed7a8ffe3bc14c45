"""What a job is to the scheduler that answers for it: its phase, lease, attempts and trace, its
admission, and how it ends without a worker. Everything above uses it; it imports no other room."""
