"""Failing links: silent relays, hosts whose link is down, connects that break."""
