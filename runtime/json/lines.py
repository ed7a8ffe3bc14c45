"""JSON on one line, whatever a reader takes for the end of a line."""

from __future__ import annotations

# What JSON leaves as it is and Python's ``splitlines``, among others, takes for ends of lines:
# U+0085, U+2028 and U+2029 in UTF-8. To look for a first byte costs a fraction of looking for all.
_LINE_ENDS = {
    0xC2: ((b"\xc2\x85", b"\\u0085"),),
    0xE2: ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")),
}


def on_one_line(json: bytes) -> bytes:
    """The same JSON with these characters escaped."""
    if json.isascii():
        return json
    for first_byte, marks in _LINE_ENDS.items():
        if first_byte in json:
            for mark, escape in marks:
                json = json.replace(mark, escape)
    return json
