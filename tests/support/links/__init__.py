"""Links that fail: relays that fall silent, hosts whose link is down, connects that break."""
