"""Which addresses lead where."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether what listens there can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
