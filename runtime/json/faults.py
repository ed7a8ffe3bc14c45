"""Why a payload is no JSON, in words that its author can use."""

from __future__ import annotations

import re

_DECODER_S_WORDS = ("truncated", "surrogate", "hex escape")
# A pair, or else half of one (the group), or else any other escape.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
_RAW_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


def json_fault(payload: bytes | str, error: Exception) -> str:
    """The decoder's sentence, or where the payload is not UTF-8, or that half of a surrogate pair
    is in it, which the decoder takes for an early end of the data or for broken UTF-8."""
    data = payload.encode() if isinstance(payload, str) else payload
    if isinstance(error, UnicodeDecodeError):
        half = _RAW_HALF.search(data)
        if half is not None:
            return _sentence(ord(half[0].decode("utf-8", "surrogatepass")), half.start())
        return _broken_text(data) or str(error)
    if any(word in str(error) for word in _DECODER_S_WORDS):
        for escape in _ESCAPE.finditer(data):
            if escape[1]:
                return _sentence(int(escape[1], 16), escape.start())
    return str(error)


def _broken_text(data: bytes) -> str:
    """Where the payload is no UTF-8: the decoder counts from the beginning of a text in it."""
    try:
        data.decode()
    except UnicodeDecodeError as fault:
        return f"byte {fault.start} (0x{data[fault.start]:02x}) is not UTF-8: {fault.reason}"
    return ""


def _sentence(code: int, at: int) -> str:
    return (
        f"\\u{code:04x} at byte {at} is half of a surrogate pair; send both halves, or the "
        "character itself in UTF-8"
    )
