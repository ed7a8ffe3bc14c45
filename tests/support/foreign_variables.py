"""Variables that a shell or Kubernetes may set, and that no part of a system may follow."""

from __future__ import annotations

# Nothing listens there.
_DEAD = "http://127.0.0.1:9"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WS_PROXY", "WSS_PROXY", "FTP_PROXY")

DEAD_PROXIES = {
    **dict.fromkeys(_PROXIES, _DEAD),
    **dict.fromkeys(map(str.lower, _PROXIES), _DEAD),
    "NO_PROXY": "",
    "no_proxy": "",
}
SERVICE_LINKS = {
    "MILLRACE_SERVICE_HOST": "10.96.0.1",
    "MILLRACE_SERVICE_PORT": "8000",
    "MILLRACE_SERVICE_PORT_HTTP": "8000",
    "MILLRACE_PORT": "tcp://10.96.0.1:8000",
    "MILLRACE_PORT_8000_TCP": "tcp://10.96.0.1:8000",
    "MILLRACE_PORT_8000_TCP_PROTO": "tcp",
    "MILLRACE_PORT_8000_TCP_PORT": "8000",
    "MILLRACE_PORT_8000_TCP_ADDR": "10.96.0.1",
    "MILLRACE_GATEWAY_PORT": "tcp://10.96.0.2:8000",
}
FOREIGN_VARIABLES = {**DEAD_PROXIES, **SERVICE_LINKS}
