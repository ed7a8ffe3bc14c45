"""Variables that Kubernetes sets in every pod for each Service of the namespace (service links).

For a Service named ``millrace`` or ``millrace-…`` they begin as settings do. They have a form of
their own, in name and value, which no setting has.
"""

from __future__ import annotations

import re

_SERVICE = r"MILLRACE(?:_+[A-Z0-9]+)*"
_URL = re.compile(r"(?:tcp|udp|sctp)://\S+:\d+")
_NUMBER = re.compile(r"\d+")
_FORMS = (
    (re.compile(rf"{_SERVICE}_SERVICE_HOST"), re.compile(r"[0-9A-Fa-f.:]+")),
    (re.compile(rf"{_SERVICE}_SERVICE_PORT(?:_[A-Z0-9_]+)?"), _NUMBER),
    (re.compile(rf"{_SERVICE}_PORT"), _URL),
    (re.compile(rf"{_SERVICE}_PORT_\d+_(?:TCP|UDP|SCTP)"), _URL),
    (re.compile(rf"{_SERVICE}_PORT_\d+_(?:TCP|UDP|SCTP)_PROTO"), re.compile(r"tcp|udp|sctp")),
    (re.compile(rf"{_SERVICE}_PORT_\d+_(?:TCP|UDP|SCTP)_PORT"), _NUMBER),
    (
        re.compile(rf"{_SERVICE}_PORT_\d+_(?:TCP|UDP|SCTP)_ADDR"),
        re.compile(r"[0-9A-Fa-f.:]+"),
    ),
)


def is_service_variable(name: str, value: str) -> bool:
    """Whether name and value both have a form that Kubernetes gives them."""
    return any(names.fullmatch(name) and values.fullmatch(value) for names, values in _FORMS)
