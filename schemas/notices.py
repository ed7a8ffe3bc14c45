"""Notices: parts of a request that its answer leaves out.

A notice travels as the header ``x-millrace-notice`` and as a field of that name: in whole answers,
in the last server-sent event, in the WebSocket's ``done`` and in a job's ``Done`` and result.
``docs/notices.md`` lists the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

NOTICE_NAME = "x-millrace-notice"
NOTICE_HEADER = NOTICE_NAME.encode()
MAX_NOTICES = 16
MAX_NOTICE_CHARACTERS = 200


class NoticeCode(StrEnum):
    """Kind of a left-out part."""

    TOOL_LEFT_OUT = "tool_left_out"
    CONTENT_LEFT_OUT = "content_left_out"
    TEXT_CUT = "text_cut"
    ITEM_LEFT_OUT = "item_left_out"
    GRAMMAR_NOT_KEPT = "grammar_not_kept"
    SCHEMA_KEYWORD_DROPPED = "schema_keyword_dropped"
    STRICT_NOT_ENFORCED = "strict_not_enforced"
    STRICT_VIOLATED = "strict_violated"
    BUDGET_NOT_ENFORCED = "budget_not_enforced"
    NOTICES_LEFT_OUT = "notices_left_out"


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a request that the answer leaves out. ``param`` is the request's field, ``detail``
    the name of the left-out part; ``notice`` cuts both to 200 characters."""

    code: NoticeCode
    param: str = ""
    detail: str = ""


Notices = tuple[Notice, ...]


def notice(code: NoticeCode, param: str = "", detail: str = "") -> Notice:
    """Make a notice, with its texts cut to the length that every carrier supports."""
    return Notice(code, param[:MAX_NOTICE_CHARACTERS], detail[:MAX_NOTICE_CHARACTERS])


def bounded(notices: Sequence[Notice]) -> Notices:
    """Keep at most 16 notices. The last one then says how many are left out, including those left
    out by an earlier call."""
    told = [one for one in notices if one.code is not NoticeCode.NOTICES_LEFT_OUT]
    num_left_out = sum(map(_num_left_out, notices))
    if len(told) <= MAX_NOTICES - bool(num_left_out):
        kept = told
    else:
        kept = told[: MAX_NOTICES - 1]
        num_left_out += len(told) - len(kept)
    if not num_left_out:
        return tuple(kept)
    return (*kept, Notice(NoticeCode.NOTICES_LEFT_OUT, detail=str(num_left_out)))


def _num_left_out(one: Notice) -> int:
    is_count = one.code is NoticeCode.NOTICES_LEFT_OUT and one.detail.isdecimal()
    return int(one.detail) if is_count else 0


def field_of(notices: Notices) -> Notices | msgspec.UnsetType:
    """Return the value of an answer's field ``x-millrace-notice``: unset without notices."""
    return notices or msgspec.UNSET


def header_value(notices: Notices) -> bytes:
    """Return a list of tokens with parameters (RFC 8941): ``tool_left_out;param="tools[0]", …``. A
    character that is not allowed in headers becomes ``?``."""
    return b", ".join(map(_item, notices))


def _item(one: Notice) -> bytes:
    item = one.code.value.encode()
    for name, value in (("param", one.param), ("detail", one.detail)):
        if value:
            item += b";%b=%b" % (name.encode(), _quoted(value))
    return item


def _quoted(value: str) -> bytes:
    plain = "".join(char if " " <= char <= "~" else "?" for char in value)
    return b'"' + plain.replace("\\", "\\\\").replace('"', '\\"').encode() + b'"'
