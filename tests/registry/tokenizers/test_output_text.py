"""Output text of a sequence: stop strings, held-back text, and independence of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.tokenizers.output_text import TextStream
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.sampling import SAMPLING_FIELDS, SamplingParams
from millrace.schemas.tools import ToolFormat
from tests.support.engine.tokenizers_made import byte_level, write_tokenizer

EOS = 1
_PROMPT = (10, 11, 12)
_TEXTS = st.text(alphabet="ab END.é你👍\n", max_size=40)
_STOPS = st.lists(st.text(alphabet="ab END.é你", min_size=1, max_size=5), max_size=4).map(tuple)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, byte_level())
    made = Tokenizer.load(path)
    made.eos_token_ids = (EOS,)
    return made


def _stream(tokenizer: Tokenizer, stop: tuple[str, ...] = (), **sampling: object) -> TextStream:
    return TextStream(tokenizer, SamplingParams(stop=stop, **sampling), _PROMPT)  # type: ignore[arg-type]


def _run(stream: TextStream, token_ids: Sequence[int]) -> list[str]:
    pieces = []
    for token_id in token_ids:
        piece = stream.push(token_id)
        pieces.append(piece.text)
        if piece.stopped:
            return pieces
    return [*pieces, stream.flush()]


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """Return the text up to the stop string that is complete first, found by the slow method."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(text=_TEXTS, stops=_STOPS, data=st.data())
def test_pieces_are_the_decoded_text_cut_at_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    # However the text is cut into tokens: as the tokenizer would, or at any place.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    token_ids = [token for part in parts for token in tokenizer.encode(part, False)]
    whole = tokenizer.decode(token_ids)
    assert "".join(_run(_stream(tokenizer, stops), token_ids)) == _cut(whole, stops)


@given(
    token_ids=st.lists(st.integers(0, 399), max_size=30),
    stops=_STOPS,
    at=st.integers(0, 30),
    includes_stop=st.booleans(),
    skips=st.booleans(),
)
def test_a_primed_stream_goes_on_where_the_other_left_off(
    tokenizer: Tokenizer,
    token_ids: list[int],
    stops: tuple[str, ...],
    at: int,
    includes_stop: bool,
    skips: bool,
) -> None:
    options: dict[str, object] = {
        "include_stop_str_in_output": includes_stop,
        "skip_special_tokens": skips,
    }
    first = _stream(tokenizer, stops, **options)
    pieces = _run(first, token_ids)
    at = min(at, len(token_ids))
    second = _stream(tokenizer, stops, **options)
    primed = second.prime(token_ids[:at])
    rest = [] if second.stopped else _run(second, token_ids[at:])
    assert [text for text in [*primed, *rest] if text] == [text for text in pieces if text]
    assert second.stop_string == first.stop_string


@given(token_ids=st.lists(st.integers(2, 399), max_size=30))
def test_random_tokens_never_yield_half_a_character(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    pieces = _run(_stream(tokenizer), token_ids)
    prompt = list(_PROMPT)
    whole = tokenizer.decode(prompt + token_ids)
    assert tokenizer.decode(prompt) + "".join(pieces) == whole


def test_special_and_stop_tokens_add_no_text(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello", False)
    stream = _stream(tokenizer, stop_token_ids=(hello[-1],), ignore_eos=True)
    pieces = _run(stream, [*hello[:-1], EOS, 0, hello[-1]])
    assert "".join(pieces) == tokenizer.decode(hello[:-1])


def test_what_may_become_a_stop_string_is_held_back_and_no_more(tokenizer: Tokenizer) -> None:
    stream = _stream(tokenizer, ("\n\nUser:",))
    shown = ""
    for token in tokenizer.encode("yes.\n\nUs", False):
        shown += stream.push(token).text
    assert shown == "yes."
    for token in tokenizer.encode("eful", False):
        shown += stream.push(token).text
    assert shown == "yes.\n\nUseful"
    assert stream.flush() == ""


def test_nothing_follows_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = _stream(tokenizer, (".",))
    pieces = [stream.push(token) for token in tokenizer.encode("a.b.c", False)]
    assert "".join(piece.text for piece in pieces) == "a"
    assert stream.stopped
    assert pieces[-1].stopped
    assert stream.flush() == ""


def test_a_stop_string_is_in_the_text_if_asked_for(tokenizer: Tokenizer) -> None:
    stream = _stream(tokenizer, ("b.", "zz"), include_stop_str_in_output=True)
    assert "".join(_run(stream, tokenizer.encode("a b. c", False))) == "a b."
    assert stream.stop_string == "b."


def test_a_stop_token_is_in_the_text_if_asked_for(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello", False)
    stream = _stream(tokenizer, stop_token_ids=(hello[-1],), include_stop_str_in_output=True)
    assert "".join(_run(stream, hello)) == "hello"


def test_special_tokens_are_text_if_they_are_not_skipped(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("hi", False), EOS]
    told = tokenizer.decode(token_ids, skip_special_tokens=False)
    options = {"skip_special_tokens": False, "ignore_eos": True}
    assert told != "hi"
    assert "".join(_run(_stream(tokenizer, **options), token_ids)) == told  # type: ignore[arg-type]
    ended = _stream(tokenizer, skip_special_tokens=False)
    assert "".join(_run(ended, token_ids)) == "hi"  # the end itself is none of it
    both = _stream(tokenizer, skip_special_tokens=False, include_stop_str_in_output=True)
    assert "".join(_run(both, token_ids)) == told


def test_what_may_end_a_text_is_declared(tokenizer: Tokenizer) -> None:
    """An engine holds tokens back only for fields that are declared to end a text."""
    read: set[str] = set()

    class Recorder:
        def __getattr__(self, name: str) -> object:
            read.add(name)
            return getattr(options, name)

    options = SamplingParams(stop=("x",), one_call=ToolFormat.HERMES)
    TextStream(tokenizer, Recorder(), _PROMPT)  # type: ignore[arg-type]
    # These say what belongs to the text, or end a completion by its tokens.
    told_by_tokens = {
        *("skip_special_tokens", "include_stop_str_in_output", "ignore_eos", "stop_token_ids"),
        "reasoning",
    }
    ending = {name for name, traits in SAMPLING_FIELDS.items() if traits.ends_text}
    assert read - told_by_tokens == ending


@pytest.mark.parametrize(
    ("asked", "may_end"),
    [
        ({"stop": ("x",)}, True),
        ({"one_call": ToolFormat.HERMES}, True),
        ({"stop_token_ids": (3,)}, False),
        ({}, False),
    ],
)
def test_a_request_that_its_text_may_end_is_watched(asked: dict[str, Any], may_end: bool) -> None:
    assert SamplingParams(**asked).may_end_in_text is may_end
