"""Messages of a conversation, as chat clients send them."""
