"""An error behind the beginning of an answer, as clients of ClickHouse look for it."""

from __future__ import annotations

import secrets
import string

_TAG_CHARS = 16
# Clients look for the block in the last 16 KiB.
_MAX_MESSAGE_BYTES = 15 * 1024


def new_tag() -> str:
    """The value of ``X-ClickHouse-Exception-Tag``, so that no data of an answer can pass for the
    block."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(_TAG_CHARS))


def exception_block(tag: str, message: str) -> bytes:
    """The block that ends an answer which failed."""
    text = message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore").encode() + b"\n"
    mark = tag.encode()
    return b"\r\n__exception__\r\n%b\r\n%b%d %b\r\n__exception__\r\n" % (
        mark,
        text,
        len(text),
        mark,
    )
