"""Every header that the gateway sets is declared: it is documented, and web pages may read it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from millrace.gateway.transport.response_headers import EXPOSED, HEADERS, RATE_LIMITS, ROUTED
from tests.support.repository import ROOT

_OF_ITS_OWN = re.compile(rb"(x-|retry-after|traceparent)[a-z-]*")
# A hint to proxies, which clients have no use for.
_NOT_FOR_CLIENTS = {b"x-accel-buffering"}


def _set_in(source: str) -> Iterator[bytes]:
    """The names in pairs of a name and a value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            match node.elts[0]:
                case ast.Constant(value=bytes(name)) if _OF_ITS_OWN.fullmatch(name):
                    yield name


def test_each_header_that_is_set_is_declared() -> None:
    files = (ROOT / "gateway").rglob("*.py")
    found = {name for file in files for name in _set_in(file.read_text(encoding="utf-8"))}
    assert b"x-millrace-model" in found
    assert found - _NOT_FOR_CLIENTS <= set(EXPOSED.split(b", "))


def test_each_group_is_in_the_document() -> None:
    assert HEADERS.keys() >= RATE_LIMITS.keys() | ROUTED.keys()
