"""Halves of surrogate pairs in JSON, and their error messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.bus.codec import JOB, JSON
from millrace.registry.requests.decoding import decode
from millrace.runtime.json.faults import json_fault
from millrace.schemas.errors import InvalidJsonError, MalformedMessageError

_ANY = msgspec.json.Decoder(dict[str, Any])


@pytest.mark.parametrize(
    ("body", "half"),
    [
        (rb'{"a":"\ud800"}', r"\ud800 at byte 6"),
        (rb'{"a":"\uD83D"}', r"\ud83d at byte 6"),
        (rb'{"a":"x\udc00"}', r"\udc00 at byte 7"),
        (rb'{"a":"\ud83d \ude00"}', r"\ud83d at byte 6"),
        (rb'{"a":"\ud800\u0041"}', r"\ud800 at byte 6"),
        (rb'{"a":"\ud83d\ude00\ude00"}', r"\ude00 at byte 18"),
        (rb'{"a":"\\\\ud800","b":"\ud800"}', r"\ud800 at byte 22"),
        (rb'{"\ud800":1}', r"\ud800 at byte 2"),
        (b'{"a":"\xed\xa0\xbd"}', r"\ud83d at byte 6"),
    ],
)
def test_half_a_pair_is_told_with_its_place(body: bytes, half: str) -> None:
    sentence = f"{half} is half of a surrogate pair; send both halves"
    with pytest.raises(InvalidJsonError) as refused:
        decode(_ANY, body)
    assert sentence in refused.value.message
    if b"\xed" not in body:
        with pytest.raises(InvalidJsonError) as of_text:
            decode(_ANY, body.decode())
        assert sentence in of_text.value.message


def test_half_a_pair_in_a_job_is_told() -> None:
    with pytest.raises(MalformedMessageError, match=r"\\udc00 at byte 11 is half of a surrogate"):
        JOB.decode(rb'{"prompt":"\udc00"}', JSON)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (rb'{"a":"\\ud800', "Input data was truncated"),
        (rb'{"a":"\ud83d\ude00', "Input data was truncated"),
        (rb'{"a":"\ud83d\ude00"]', "JSON is malformed: expected ',' or '}'"),
        (rb'{"a":"\u12"}', "invalid character in unicode escape"),
    ],
)
def test_other_faults_are_told_in_the_decoder_s_words(body: bytes, why: str) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as fault:
        _ANY.decode(body)
    assert why in json_fault(body, fault.value)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"a":"bc\xff"}', "byte 8 (0xff) is not UTF-8: invalid start byte"),
        (b'{"\xc3\xa9":1,"b\xc3":2}', "byte 10 (0xc3) is not UTF-8: invalid continuation byte"),
    ],
)
def test_broken_text_is_told_with_its_place_in_the_body(body: bytes, place: str) -> None:
    with pytest.raises(InvalidJsonError) as refused:
        decode(_ANY, body)
    assert place in refused.value.message
