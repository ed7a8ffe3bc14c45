"""The choice of a server in a NATS cluster, and what a client does when its server is gone."""
