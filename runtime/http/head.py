"""Bounds of an HTTP/1.1 request head, and its possible faults."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_HEAD_BYTES = 65_536
MAX_FIELDS = 128
_HOST = re.compile(rb"(\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+;=%-]*)(:[0-9]*)?")

Headers = Sequence[tuple[bytes, bytes]]


class HttpFault(NamedTuple):
    """Fault for which a connection is refused before a request reaches the application."""

    status: int
    code: str
    message: str


def too_large(what: str) -> HttpFault:
    """Return the fault of headers, trailers or chunk lines that exceed the bounds."""
    return HttpFault(
        431,
        "request_header_fields_too_large",
        f"{what} are limited to {MAX_HEAD_BYTES} bytes and {MAX_FIELDS} fields.",
    )


def head_fault(version: str, method: str, headers: Headers) -> HttpFault | None:
    """Return the fault of a syntactically valid head; None if it has none.

    ``headers`` have names in lower case.
    """
    if version not in ("1.0", "1.1"):
        return wrong_version(f"HTTP/{version}")
    if method == "CONNECT":
        message = "This server is not a proxy; CONNECT is not implemented."
        return HttpFault(501, "method_not_implemented", message)
    hosts, has_codings = [], False
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            has_codings = True
    if not hosts and version == "1.1":
        return invalid("HTTP/1.1 requires a Host header; the request has none.")
    if len(hosts) > 1:
        return invalid(f"The request has {len(hosts)} Host headers; send one.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return invalid(f"The Host header is not a host and port: {_shown(hosts[0])}.")
    return _coding_fault(version, headers) if has_codings else None


def _coding_fault(version: str, headers: Headers) -> HttpFault | None:
    codings = tokens(headers, b"transfer-encoding")
    if version == "1.0":
        return invalid("HTTP/1.0 has no Transfer-Encoding; send Content-Length.")
    if codings[-1:] != [b"chunked"]:
        return invalid("The last coding of Transfer-Encoding must be chunked.")
    if len(codings) > 1:
        coding = _shown(codings[0])
        return HttpFault(
            501,
            "transfer_coding_not_implemented",
            f"Transfer-Encoding {coding} is not implemented; send chunked alone. A compressed body "
            "is declared by Content-Encoding.",
        )
    return None


def wrong_version(version: str) -> HttpFault:
    message = f"This server speaks HTTP/1.1, not {version}."
    return HttpFault(505, "http_version_not_supported", message)


def invalid(message: str) -> HttpFault:
    return HttpFault(400, "invalid_http", message)


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1"))[:200]


def tokens(headers: Headers, name: bytes) -> list[bytes]:
    """Return the elements, in lower case, of all headers of a name whose value is a list."""
    return [token for known, value in headers if known == name for token in split(value)]


def split(value: bytes) -> list[bytes]:
    return [token for one in value.split(b",") if (token := one.strip().lower())]
