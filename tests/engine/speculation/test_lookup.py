"""Suggestions of a lookup, compared with a search through all tokens."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.speculation.lookup import Lookup

_TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(prompt=_TOKENS, output=_TOKENS)
def test_lookup_suggests_tokens_that_followed_the_same_two(
    prompt: list[int], output: list[int]
) -> None:
    tokens = prompt + output
    lookup = Lookup(prompt, (), 0, 10_000)
    for end in range(len(prompt) + 1, len(tokens) + 1):
        known = tokens[:end]
        lookup.extend(known)
        found, match = lookup.suggest(4)
        if match == 0:
            continue
        places = [
            place
            for place in range(match, end)
            if known[place - match : place] == known[end - match : end]
        ]
        assert any(_round(known, place, 4) == found for place in places)


@given(prompt=_TOKENS, output=_TOKENS)
def test_lookup_finds_a_match_where_the_last_two_tokens_occurred(
    prompt: list[int], output: list[int]
) -> None:
    tokens = prompt + output
    lookup = Lookup(prompt, (), 0, 10_000)
    for end in range(len(prompt) + 1, len(tokens) + 1):
        lookup.extend(tokens[:end])
        met = any(tokens[p - 2 : p] == tokens[end - 2 : end] for p in range(2, end))
        if met:
            assert lookup.suggest(1).token_ids


def test_a_copy_is_followed_from_its_third_token_on() -> None:
    text = random.Random(1).sample(range(1000), 50)
    lookup = Lookup([*text, 7, 8, 9], (), 0, 10_000)
    made = [*text, 7, 8, 9]
    right = 0
    for token in text:
        right += lookup.suggest(1).token_ids == [token]
        made.append(token)
        lookup.extend(made)
    assert right == 48
    assert lookup.suggest(3).token_ids == [7, 8, 9]


def test_loop_of_tokens_is_continued() -> None:
    lookup = Lookup([5, 1, 2, 3, 1, 2], (), 0, 10_000)
    assert lookup.suggest(7).token_ids == [3, 1, 2, 3, 1, 2, 3]


def test_a_prediction_begins_with_the_answer_and_goes_on_behind_what_differs() -> None:
    lookup = Lookup([90, 91], (1, 2, 3, 4, 5, 6), 0, 10_000)
    assert lookup.suggest(3).token_ids == [1, 2, 3]
    lookup.extend([90, 91, 1, 77])
    found, match = lookup.suggest(9)
    assert (found, match) == ([3, 4, 5, 6], 0)
    lookup.extend([90, 91, 1, 77, 3])
    assert lookup.suggest(2).token_ids == [4, 5]
    lookup.extend([90, 91, 1, 77, 3, 4, 5, 6])
    assert lookup.suggest(2).token_ids == []


def test_a_prediction_is_found_again_behind_what_was_put_in() -> None:
    lookup = Lookup([90], (1, 2, 3, 4, 5, 6), 0, 10_000)
    lookup.extend([90, 1, 2, 50, 51, 52, 3, 4])
    assert lookup.suggest(9).token_ids == [5, 6]


def test_an_answer_that_was_begun_before_is_followed() -> None:
    lookup = Lookup([90, 1, 2, 3], (1, 2, 3, 4, 5), 3, 10_000)
    assert lookup.suggest(9).token_ids == [4, 5]


def test_a_long_prompt_is_indexed_bit_by_bit() -> None:
    prompt = [*range(5000), 3, 4]
    lookup = Lookup(prompt, (), 0, 10_000)
    for _ in range(5):
        prompt.append(len(prompt) + 10_000)
        lookup.extend(prompt)
    prompt += [20, 21]
    lookup.extend(prompt)
    assert lookup.suggest(2).token_ids == [22, 23]


def _round(known: list[int], place: int, count: int) -> list[int]:
    period = known[place:]
    return [period[i % len(period)] for i in range(count)] if period else []
