"""Attempts of a request, which this version also writes and reads under their former name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.schemas.control import Dispatch
from millrace.schemas.jobs import Job
from millrace.schemas.records import Attempt, RequestRecord

_ATTEMPTS = (Attempt(epoch=1, worker_id="w-1"),)
_MESSAGES: list[dict[str, Any]] = [
    {"kind": RequestRecord, "request_id": "r1", "tenant": "acme"},
    {
        "kind": Dispatch,
        "job": Job(request_id="r1", tenant="acme", model="m", prompt="Hi"),
        "epoch": 2,
        "lease": "l",
    },
]


@pytest.mark.parametrize("fields", _MESSAGES, ids=lambda fields: fields["kind"].__name__)
@pytest.mark.parametrize("name", ["attempts", "lives"])
def test_either_name_gives_both(fields: dict[str, Any], name: str) -> None:
    fields = dict(fields)
    kind = fields.pop("kind")
    message = kind(**fields, **{name: _ATTEMPTS})
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert written["attempts"] == written["lives"]
    del written[name]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(written), type=kind)
    assert (read.attempts, read.lives) == (_ATTEMPTS, _ATTEMPTS)
