"""Number of proposed tokens: as many as pay, within budget and blocks that no other request
needs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.scheduling.cost_model import CostModel, StepWork
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.speculation.draft import Draft
from millrace.engine.speculation.speculator import Speculator, _Rates
from millrace.engine.speculation.suggestions import FORCED, Acceptance, Suggestions, match_class
from tests.engine.scheduling.test_planner import make_planner, sequence, step

_TEXT = [*range(100, 140)]


def _costs(base_s: float, row_s: float) -> CostModel:
    costs = CostModel()
    draw = random.Random(1)
    for _ in range(200):
        rows = draw.randrange(1, 64)
        costs.observe(StepWork(0, rows, rows * 50), base_s + rows * row_s)
    return costs


class _Decoding:
    """Sequences that repeat their prompts as they decode, with their planner."""

    def __init__(self, count: int, num_blocks: int = 4096, **more: Any) -> None:
        self.planner = make_planner(num_blocks, 4096, 64)
        self.sequences = [sequence(len(_TEXT), **{"max_tokens": 200} | more) for _ in range(count)]
        for one in self.sequences:
            one.token_ids[: len(_TEXT)] = _TEXT
            self.planner.add(one)
        step(self.planner)
        for one in self.sequences:
            one.started = True
            one.token_ids[-1] = _TEXT[0]

    def say(self, token: int) -> None:
        step(self.planner)
        for one in self.sequences:
            one.token_ids[-1] = token

    def plan(self) -> list[ScheduledSequence]:
        return self.planner.plan()


def _propose(
    decoding: _Decoding,
    costs: CostModel,
    told: float = 0.95,
    budget: int = 4096,
    itl_bound_s: float | None = None,
) -> list[int]:
    speculator = Speculator(decoding.planner.tables, costs, budget, itl_bound_s)
    for kind in range(FORCED):
        for _ in range(400):
            speculator._acceptance.note(kind, came=random.Random(_).random() < told)
    speculator.propose(decoding.plan())
    decoding.planner.check_integrity()
    return [len(one.proposed) for one in decoding.sequences]


def _copying(count: int, **more: Any) -> _Decoding:
    decoding = _Decoding(count, **more)
    for token in _TEXT[1:6]:
        decoding.say(token)
    return decoding


def test_repeated_tokens_are_proposed_where_rows_are_cheap() -> None:
    decoding = _copying(1)
    (count,) = _propose(decoding, _costs(20e-3, 0.5e-3))
    (one,) = decoding.sequences
    assert count > 8
    assert one.proposed == _TEXT[6 : 6 + count]
    assert len(one.block_table) * 4 >= one.num_computed_tokens + 1 + count


def test_fewer_are_proposed_where_rows_cost_more_or_fewer_come() -> None:
    cheap = _propose(_copying(1), _costs(20e-3, 0.2e-3))
    dear = _propose(_copying(1), _costs(20e-3, 3e-3))
    unsure = _propose(_copying(1), _costs(20e-3, 0.2e-3), told=0.5)
    assert cheap[0] > dear[0] > 0
    assert cheap[0] > unsure[0] > 0


def test_nothing_is_proposed_where_rows_make_the_step() -> None:
    assert _propose(_copying(1), _costs(0.1e-3, 3e-3)) == [0]
    assert _propose(_copying(48), _costs(10e-3, 3e-3)) == [0] * 48


def test_tokens_that_are_never_accepted_are_not_proposed() -> None:
    assert _propose(_copying(1), _costs(20e-3, 1e-3), told=0.01) == [0]


def test_budget_blocks_and_the_end_bound_what_is_proposed() -> None:
    cheap = _costs(20e-3, 1e-5)
    assert _propose(_copying(2), cheap, budget=5) == [3, 0]
    assert _propose(_copying(1, max_tokens=8), cheap) == [1]
    assert _propose(_copying(1, max_tokens=7), cheap) == [0]
    decoding = _copying(1, num_blocks=12, max_tokens=8)
    assert decoding.planner.tables.pool.num_free_blocks == 0
    assert _propose(decoding, cheap) == [1]


def test_no_step_becomes_longer_than_the_bound_between_tokens() -> None:
    costs = _costs(20e-3, 0.5e-3)
    free = _propose(_copying(1), costs)
    bound = _propose(_copying(1), costs, itl_bound_s=23e-3)
    assert free[0] > bound[0] > 0
    assert 20e-3 + (1 + bound[0]) * 0.5e-3 <= 23.1e-3
    assert _propose(_copying(1), costs, itl_bound_s=20e-3) == [0]


def test_a_first_token_is_never_followed() -> None:
    decoding = _copying(1)
    decoding.sequences[0].started = False
    assert _propose(decoding, _costs(20e-3, 1e-4)) == [0]


@given(st.data())
def test_blocks_behind_what_came_are_given_back(data: st.DataObject) -> None:
    planner = make_planner(64, 64, 4)
    guaranteed = data.draw(st.booleans())
    one = sequence(data.draw(st.integers(1, 20)), max_tokens=60)
    one.num_preemptions = 4 if guaranteed else 0
    planner.add(one)
    step(planner)
    for _ in range(12):
        plan = planner.plan()
        room = one.max_total_tokens - one.num_tokens - 1
        wanted = min(data.draw(st.integers(0, 17)), room)
        count = planner.tables.allocate_ahead(one, wanted)
        assert count == wanted
        planner.check_integrity()
        planner.advance(plan)
        one.token_ids.append(1)
        came = data.draw(st.integers(0, count))
        for _ in range(came):
            planner.advance([ScheduledSequence(one, 1)])
            one.token_ids.append(1)
        planner.tables.free_ahead(one)
        planner.check_integrity()
        assert len(one.block_table) == -(-one.num_computed_tokens // 4)
        if one.num_tokens >= one.max_total_tokens - 1:
            break
    planner.remove(one)
    assert planner.tables.pool.num_free_blocks == 64
    assert planner.tables.num_reserved_blocks == 0


def test_blocks_that_are_promised_to_others_are_left_alone() -> None:
    planner = make_planner(8, 8, 2)
    one, other = sequence(3, max_tokens=28), sequence(16, max_tokens=4)
    planner.add(one)
    step(planner)
    planner.add(other)
    plan = planner.plan()
    assert [item.num_tokens for item in plan] == [1, 7]
    assert planner.tables.num_reserved_blocks == 2
    free = planner.tables.pool.num_free_blocks - 2
    assert planner.tables.allocate_ahead(one, 100) == 4 * (len(one.block_table)) - 4
    assert planner.tables.pool.num_free_blocks == 2
    assert free > 0
    planner.check_integrity()


def test_shares_follow_what_comes_and_what_others_have_seen() -> None:
    all_of_them = Acceptance()
    own = Acceptance(all_of_them)
    kind = match_class(4)
    before = own.chance(kind)
    for _ in range(20):
        own.note(kind, came=False)
    assert own.chance(kind) < 0.1 < all_of_them.chance(kind) < before
    assert Acceptance(all_of_them).chance(kind) == pytest.approx(all_of_them.chance(kind))
    for _ in range(20):
        own.note(kind, came=True)
    assert own.chance(kind) > 0.7


def test_a_draft_that_was_measured_on_a_busy_machine_is_measured_again() -> None:
    target = _costs(20e-3, 0.2e-3)
    runner = SimpleNamespace(
        config=SimpleNamespace(vocab_size=64),
        host_device=torch.device("cpu"),
        likeliest=None,
        cache=SimpleNamespace(block_size_tokens=16),
    )
    draft = Draft(cast(Any, runner), target)
    decoding = _copying(1)
    speculator = Speculator(decoding.planner.tables, target, 4096, draft=draft)
    for one in decoding.sequences:
        one.suggestions = Suggestions(one, speculator._acceptance)
    for patience in (64, 128, 256):
        for _ in range(40):
            draft._costs.observe(StepWork(0, 1, 40), 5.0)
        for step_number in range(patience):
            assert draft.step_s(1, 40) > 4, step_number
            speculator._propose_drafts(decoding.sequences, _Rates(20e-3, 0.2e-3, 1.0), 100)
        assert draft.step_s(1, 40) < 20e-3


def test_resting_sequence_is_looked_up_again_now_and_then() -> None:
    decoding = _copying(8)
    speculator = Speculator(decoding.planner.tables, _costs(3e-3, 0.2e-3), 4096)
    for kind in range(FORCED):
        for _ in range(400):
            speculator._acceptance.note(kind, came=False)
    first = decoding.sequences[0]
    looked = 0
    for token in range(30):
        before = 0 if first.suggestions is None else first.suggestions._place
        speculator.propose(decoding.plan())
        looked += first.suggestions._place != before
        decoding.say(1000 + token)
    assert 3 < looked < 20
