"""Choice of a server in a NATS cluster, and recovery from a lost server."""
