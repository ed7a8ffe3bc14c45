"""Connections: reading and writing HTTP, writing to sockets at once, origins, proxies, TLS.

Called by every other room; imports ``errors`` only.
"""
