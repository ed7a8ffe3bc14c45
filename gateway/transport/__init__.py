"""Connections: reading and writing HTTP, immediate writes to sockets, origins, proxies, TLS.

Called by all other packages of the gateway; imports ``errors`` only.
"""
