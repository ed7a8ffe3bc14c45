"""Docstrings and lines that are hard to read stay below a ceiling."""

from __future__ import annotations

import pytest

from tests.docs.plain_english import PARAPHRASES, Counted, count, is_hard_opening

# Share of docstrings with a hard opening, and number of lines with a paraphrase.
_MOST_OPENINGS = 0.003
_MOST_PARAPHRASES = 20


@pytest.fixture(scope="module")
def counted() -> Counted:
    return count([])


def test_docstrings_begin_with_a_verb_or_a_noun(counted: Counted) -> None:
    assert counted.num_docstrings > 5000
    assert len(counted.openings) <= _MOST_OPENINGS * counted.num_docstrings, "\n".join(
        map(str, counted.openings)
    )


def test_sentences_name_their_subject(counted: Counted) -> None:
    assert len(counted.paraphrases) <= _MOST_PARAPHRASES, "\n".join(map(str, counted.paraphrases))


@pytest.mark.parametrize(
    ("text", "is_hard"),
    [
        ("What came of one choice.", True),
        ("Of a time in which nobody asked, so much counts.", True),
        ("It is read once.", True),
        ("Return the blocks of a sequence.", False),
        ("Block pool with LRU eviction.", False),
        ("``epoch`` of a lease.", False),
    ],
)
def test_hard_openings_are_found(text: str, is_hard: bool) -> None:
    assert is_hard_opening(text) is is_hard


@pytest.mark.parametrize(
    ("line", "is_paraphrase"),
    [
        ("the gateway keeps conversations for whoever has a key", True),
        ("those that are well", True),
        ("nobody waits for the disk", True),
        ("Only requests that need blocks from disk wait.", False),
        ("No alerts are firing.", False),
    ],
)
def test_paraphrases_are_found(line: str, is_paraphrase: bool) -> None:
    assert (PARAPHRASES.search(line) is not None) is is_paraphrase
