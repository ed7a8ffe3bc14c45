"""JSON on one line, for readers with different line ends."""

from __future__ import annotations

# Characters that JSON does not escape and Python's ``splitlines``, among others, treats as line
# ends: U+0085, U+2028 and U+2029 in UTF-8. Searching for a first byte costs a fraction of searching
# for all.
_LINE_ENDS = {
    0xC2: ((b"\xc2\x85", b"\\u0085"),),
    0xE2: ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")),
}


def on_one_line(json: bytes) -> bytes:
    """Escape these characters in JSON."""
    if json.isascii():
        return json
    for first_byte, marks in _LINE_ENDS.items():
        if first_byte in json:
            for mark, escape in marks:
                json = json.replace(mark, escape)
    return json
