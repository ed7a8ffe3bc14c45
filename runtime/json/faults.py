"""Faults of JSON payloads, in words for their authors."""

from __future__ import annotations

import re

import msgspec

from millrace.schemas.errors import ParameterError

_DECODER_S_WORDS = ("truncated", "surrogate", "hex escape")
# A surrogate pair, or half of one (the group), or any other escape.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
_RAW_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


def json_fault(payload: bytes | str, error: Exception) -> str:
    """Return the decoder's message, or a clearer one for broken UTF-8 or half a surrogate pair.

    The decoder reports half a pair as truncated data or broken UTF-8.
    """
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
    """Return the place of invalid UTF-8 in the payload; the decoder counts from a string's
    beginning."""
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


MAX_TOKEN_IDS = 1_048_576
MAX_MESSAGES = 32_768

# A smaller body is always processed fast enough.
_LARGE_BYTES = 128 * 1024
_ARRAY_16, _ARRAY_32 = 0xDC, 0xDD
_FIX_ARRAY = range(0x90, 0xA0)


class _Outline(msgspec.Struct, frozen=True):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_JSON = msgspec.json.Decoder(_Outline)
_MSGPACK = msgspec.msgpack.Decoder(_Outline)
_JSON_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def check_outline(payload: bytes | str, *, is_json: bool = True) -> None:
    """Check the number of token ids and messages of a large body.

    Raises ParameterError, which names the field, above MAX_TOKEN_IDS or MAX_MESSAGES. A body of
    another form is left to its decoder.
    """
    if len(payload) <= _LARGE_BYTES:
        return
    try:
        if is_json or isinstance(payload, str):
            outline = _JSON.decode(payload)
        else:
            outline = _MSGPACK.decode(payload)
        for name in _Outline.__struct_fields__:
            raw = memoryview(getattr(outline, name)).tobytes()
            if len(raw) <= _LARGE_BYTES:
                continue
            num_items, limit, what = _json_items(raw) if is_json else _msgpack_items(name, raw)
            if num_items > limit:
                raise ParameterError(
                    name, f"{name} holds {num_items} {what}; at most {limit} are taken."
                )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return


def _json_items(raw: bytes) -> tuple[int, int, str]:
    """Return the number of items, their limit, and their name."""
    if not raw.startswith(b"["):
        return 0, MAX_MESSAGES, "items"
    if b'"' not in raw:
        return raw.count(b",") + 1, MAX_TOKEN_IDS, "token ids"
    return len(_JSON_LIST.decode(raw)), MAX_MESSAGES, "items"


def _msgpack_items(name: str, raw: bytes) -> tuple[int, int, str]:
    head = raw[0]
    num_items = 0
    if head in _FIX_ARRAY:
        num_items = head - _FIX_ARRAY.start
    elif head in (_ARRAY_16, _ARRAY_32):
        num_items = int.from_bytes(raw[1 : 3 if head == _ARRAY_16 else 5], "big")
    if name == "messages":
        return num_items, MAX_MESSAGES, "items"
    return num_items, MAX_TOKEN_IDS, "token ids"
