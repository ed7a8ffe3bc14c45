"""What chat clients send: the messages of a conversation."""
