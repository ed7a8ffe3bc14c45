"""Workers as heartbeats and our own dispatches show them, and how many of them there should be.
``placement``, ``queues`` and ``dispatch`` read it; it imports ``jobs``."""
