"""What agents and frameworks really send, recorded by tests/clients and cut to a few KB."""
