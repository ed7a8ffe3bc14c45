"""Features of a sequence's last tokens, up to the number that is kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.step import features as module
from millrace.engine.step.features import Features


def _rows(begin: int, end: int, mark: int) -> torch.Tensor:
    return torch.tensor([[position, mark] for position in range(begin, end)])


@given(st.data())
def test_last_features_are_kept(data: st.DataObject) -> None:
    features = Features()
    known: dict[int, int] = {}
    for mark in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            most = features.end + 3
            begin = data.draw(st.integers(max(0, features.begin - 3), most))
            count = data.draw(st.integers(1, 6))
            if not features.begin <= begin <= features.end:
                known = {}
            known = {position: own for position, own in known.items() if position < begin}
            known |= dict.fromkeys(range(begin, begin + count), mark)
            features.add(begin, _rows(begin, begin + count, mark))
        else:
            gone = data.draw(st.integers(0, features.end + 2))
            known = {position: own for position, own in known.items() if position >= gone}
            features.drop_before(gone)
        assert features.end - features.begin == len(known)
        if known:
            assert features.begin == min(known)
            begin = data.draw(st.integers(features.begin, features.end - 1))
            end = data.draw(st.integers(begin + 1, features.end))
            told = [(int(row[0]), int(row[1])) for row in features.rows(begin, end)]
            assert told == [(position, known[position]) for position in range(begin, end)]


def test_a_copy_goes_its_own_way() -> None:
    features = Features()
    features.add(0, _rows(0, 4, 1))
    other = features.copy()
    other.add(2, _rows(2, 6, 2))
    features.add(4, _rows(4, 5, 3))
    assert features.rows(0, 5)[:, 1].tolist() == [1, 1, 1, 1, 3]
    assert other.rows(0, 6)[:, 1].tolist() == [1, 1, 2, 2, 2, 2]


def test_no_more_wait_than_a_head_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING_TOKENS", 8)
    features = Features()
    for begin in range(0, 30, 3):
        features.add(begin, _rows(begin, begin + 3, 0))
    assert (features.begin, features.end) == (22, 30)
