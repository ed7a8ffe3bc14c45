"""TO SAY."""
