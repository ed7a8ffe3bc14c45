"""Simulated batch: its times, its blocks, its order, and the end of every request."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millrace.schemas.config import SimulationConfig
from millrace.schemas.errors import ConfigError
from millrace.workers.simulated.batch import MAX_PREEMPTIONS, SimulatedBatch
from millrace.workers.simulated.blocks import GenerationLimits, SimulatedSequence, State
from millrace.workers.simulated.latency_model import LatencyModel
from millrace.workers.simulated.tokens import SimulatedTokens

_CONFIG = SimulationConfig(
    prefill_tokens_per_s=1_000.0, step_ms=10.0, step_ms_per_sequence=1.0, step_ms_per_kv_token=0.1
)
_WORDS = range(1_000, 1_200)
_SIZE = 4


def _batch(
    *,
    max_num_sequences: int = 4,
    max_batch_tokens: int = 64,
    num_blocks: int = 32,
    prefix_cache: bool = True,
) -> SimulatedBatch:
    return SimulatedBatch(
        LatencyModel(_CONFIG),
        SimulatedTokens(_WORDS),
        max_num_sequences=max_num_sequences,
        max_batch_tokens=max_batch_tokens,
        num_blocks=num_blocks,
        block_size_tokens=_SIZE,
        prefix_cache=prefix_cache,
    )


def _sequence(
    name: str, prompt: Iterable[int], num_to_make: int, priority: int = 0, seed: int = 7
) -> SimulatedSequence:
    return SimulatedSequence(
        name,
        list(prompt),
        limits=GenerationLimits(num_to_make=num_to_make),
        seed=seed,
        priority=priority,
    )


def _step(batch: SimulatedBatch) -> float:
    step_s = batch.begin()
    assert step_s is not None
    batch.finish()
    batch.check_integrity()
    return step_s


def _run(batch: SimulatedBatch) -> float:
    total_s = 0.0
    while batch.has_work:
        total_s += _step(batch)
    return total_s


def test_a_step_takes_what_the_settings_say() -> None:
    batch = _batch()
    batch.add(_sequence("a", range(20), 3))
    assert _step(batch) == pytest.approx(0.020)  # 20 tokens of prompt
    assert _step(batch) == pytest.approx(0.010 + 0.001 + 21 * 0.0001)
    batch.add(_sequence("b", range(100, 110), 1))
    assert _step(batch) == pytest.approx(0.010 + 0.001 + 22 * 0.0001 + 0.010)
    assert not batch.has_work
    assert batch.begin() is None
    assert (batch.num_steps, batch.prefill_tokens, batch.decode_tokens) == (3, 30, 2)


def test_a_group_shares_the_work_and_exchanges_what_it_made() -> None:
    config = replace(
        _CONFIG,
        collective_ms=0.5,
        collective_ms_per_token=0.01,
        collective_ms_per_sequence=0.02,
    )
    group, one = LatencyModel(config, 4), LatencyModel(config)
    assert one.step_s(20, 2, 30) == pytest.approx(0.020 + 0.010 + 2 * 0.001 + 30 * 0.0001)
    assert group.decode_step_s(2, 30) == pytest.approx(
        (0.010 + 2 * 0.001 + 30 * 0.0001) / 4 + 0.0005 + 2 * (0.00001 + 0.00002)
    )
    assert group.step_s(20, 2, 30) == pytest.approx(
        group.decode_step_s(2, 30) + 20 * (0.001 / 4 + 0.00001)
    )
    assert group.step_s(20, 0, 0) == pytest.approx(20 * (0.001 / 4 + 0.00001) + 0.0005)
    assert group.step_s(0, 0, 0) == 0.0
    assert group.prefill_tokens_per_s == pytest.approx(1 / (0.001 / 4 + 0.00001))
    with pytest.raises(ConfigError, match="tensor_parallel must be at least 1"):
        LatencyModel(config, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_tokens_per_s", 0.0),
        ("collective_ms", -1.0),
        ("step_ms", -1.0),
        ("step_ms_per_kv_token", float("nan")),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        LatencyModel(SimulationConfig(**{name: value}))


def test_prompts_are_cut_by_the_budget_and_decodes_come_first() -> None:
    batch = _batch(max_batch_tokens=8)
    batch.add(_sequence("short", range(4), 4))
    batch.begin()
    assert [one.request_id for one in batch.finish().started] == ["short"]
    long = _sequence("long", range(100, 120), 1)
    batch.add(long)
    _step(batch)
    assert long.num_computed_tokens == 7  # the decoding sequence took one of the eight
    _step(batch)
    assert long.num_computed_tokens == 14


def test_tokens_follow_from_seed_and_index_on_any_engine() -> None:
    whole = _sequence("whole", range(5), 12)
    batch = _batch()
    batch.add(whole)
    _run(batch)
    made = whole.token_ids[5:]
    assert len(made) == 12
    assert set(made) <= set(_WORDS)
    for split in range(1, 12):
        rest = SimulatedSequence(
            "rest",
            [*range(5), *made[:split]],
            limits=GenerationLimits(num_to_make=12 - split),
            seed=7,
            num_resumed=split,
        )
        batch.add(rest)
        _run(batch)
        assert rest.token_ids[5:] == made
    other = _sequence("other", range(5), 12, seed=8)
    batch.add(other)
    _run(batch)
    assert other.token_ids[5:] != made


def test_stop_tokens_stop_but_not_before_min_tokens() -> None:
    batch = _batch()
    plain = _sequence("plain", range(5), 12)
    batch.add(plain)
    _run(batch)
    made = plain.token_ids[5:]
    for min_tokens, stopped_at in ((0, 4), (6, None)):
        again = SimulatedSequence(
            "again",
            range(5),
            limits=GenerationLimits(
                num_to_make=12, stop_token_ids=frozenset({made[3]}), min_tokens=min_tokens
            ),
            seed=7,
        )
        batch.add(again)
        _run(batch)
        assert again.stopped == (stopped_at is not None)
        assert again.num_made == (stopped_at or 12)
        assert made[3] not in again.token_ids[5 : 5 + min_tokens]


def test_prefixes_are_found_again_with_what_was_made_behind_them() -> None:
    batch = _batch()
    first = _sequence("first", range(10), 6)
    batch.add(first)
    _run(batch)
    turn = _sequence("turn", [*first.token_ids, 1, 2, 3], 1)
    batch.add(turn)
    assert _step(batch) == pytest.approx((19 - 12) / 1_000)
    # Of the 16 before, 15 were computed: three whole blocks.
    assert turn.num_cached_tokens == 12
    assert (batch.prefix_query_tokens, batch.prefix_hit_tokens) == (9 + 18, 12)
    salted = SimulatedSequence(
        "salted", turn.token_ids, limits=GenerationLimits(num_to_make=1), seed=1, salt="tenant"
    )
    batch.add(salted)
    _run(batch)
    assert salted.num_cached_tokens == 0


def test_no_prefix_is_found_without_the_cache() -> None:
    batch = _batch(prefix_cache=False)
    for name in ("a", "b"):
        sequence = _sequence(name, range(16), 1)
        batch.add(sequence)
        _run(batch)
        assert sequence.num_cached_tokens == 0
    assert batch.blocks.take_changes() is None


def test_what_is_kept_is_told_in_changes() -> None:
    batch = _batch(num_blocks=6)
    batch.add(_sequence("a", range(16), 1))
    _run(batch)
    known: set[bytes] = set()
    changes = batch.blocks.take_changes()
    assert changes is not None
    assert (len(changes.kept), changes.gone, changes.whole) == (4, [], False)
    known.update(changes.kept)
    batch.add(_sequence("b", range(50, 66), 1))
    _run(batch)
    changes = batch.blocks.take_changes()
    assert changes is not None
    assert len(changes.kept) == 4
    # The end of a prefix goes before its beginning, which others may share.
    assert set(changes.gone) < known
    assert batch.blocks.num_idle == 6
    assert batch.blocks.take_changes() is None


def test_too_many_changes_are_told_as_a_whole() -> None:
    batch = _batch(num_blocks=4)
    for number in range(20):
        batch.add(_sequence("a", range(number * 100, number * 100 + 12), 1))
        _run(batch)
    changes = batch.blocks.take_changes()
    assert changes is not None
    assert changes.whole
    assert len(changes.kept) == batch.blocks.num_idle


def test_a_higher_priority_takes_slots_and_blocks_at_the_next_step() -> None:
    batch = _batch(max_num_sequences=2, max_batch_tokens=1_000, num_blocks=16)
    low = [_sequence(f"low-{n}", range(n * 100, n * 100 + 20), 10) for n in range(2)]
    for sequence in low:
        batch.add(sequence)
    _step(batch)
    high = _sequence("high", range(500, 510), 1, priority=1)
    batch.add(high)
    batch.begin()
    assert high in batch.finish().finished
    assert [sequence.num_preemptions for sequence in low] == [0, 1]
    _run(batch)
    assert [sequence.num_made for sequence in low] == [10, 10]


def test_newcomers_preempt_no_request_for_ever() -> None:
    batch = _batch(max_num_sequences=1)
    low = _sequence("low", range(20), 60)
    batch.add(low)
    _step(batch)
    for number in range(10):
        batch.add(_sequence(f"high-{number}", [number], 1, priority=1))
        _step(batch)
        _step(batch)
    assert low.num_preemptions == MAX_PREEMPTIONS


def test_cancelled_during_a_step_it_makes_nothing_and_holds_nothing() -> None:
    batch = _batch()
    sequence = _sequence("a", range(20), 5)
    batch.add(sequence)
    assert batch.begin() is not None
    assert batch.cancel("a") is sequence
    assert batch.blocks.num_free == 32
    outputs = batch.finish()
    assert outputs == ([], [], [])
    assert batch.cancel("a") is None
    batch.check_integrity()


@pytest.mark.parametrize(("prompt", "num_to_make"), [(120, 20), (0, 5), (10, 0)])
def test_what_can_never_run_is_refused(prompt: int, num_to_make: int) -> None:
    batch = _batch()
    with pytest.raises(ValueError):
        batch.add(_sequence("a", range(prompt), num_to_make))
    assert not batch.has_work


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_every_request_ends_once_and_every_block_comes_back(seed: int, prefix_cache: bool) -> None:
    chance = random.Random(seed)
    batch = _batch(
        max_num_sequences=chance.randint(1, 6),
        max_batch_tokens=chance.randint(1, 40),
        num_blocks=chance.randint(8, 24),
        prefix_cache=prefix_cache,
    )
    waiting = {f"r{n}" for n in range(30)}
    live: set[str] = set()
    ended: set[str] = set()
    for _ in range(10_000):
        while waiting and chance.random() < 0.4:
            name = waiting.pop()
            base = chance.choice((0, 100))
            prompt = range(base, base + chance.randint(1, 20))
            batch.add(_sequence(name, prompt, chance.randint(1, 10), chance.randint(0, 2)))
            live.add(name)
        step_s = batch.begin()
        if live and chance.random() < 0.05:
            name = chance.choice(sorted(live))
            sequence = batch.cancel(name)
            assert sequence is not None
            assert sequence.state is State.OVER
            live.remove(name)
        outputs = batch.finish()
        assert (step_s is not None) or not outputs.made
        for sequence in outputs.finished:
            assert len(sequence.token_ids) == sequence.num_total_tokens
            live.remove(sequence.request_id)
            ended.add(sequence.request_id)
        batch.check_integrity()
        if not waiting and not live:
            break
    assert not batch.has_work
    assert batch.blocks.num_free == batch.blocks.num_blocks
    assert batch.outstanding_tokens == 0


def test_blocks_that_come_from_elsewhere_are_found_as_if_they_had_been_computed() -> None:
    elsewhere, here = _batch(), _batch()
    prompt = range(500, 521)
    elsewhere.add(_sequence("a", prompt, 2))
    _run(elsewhere)
    wanted = _sequence("b", prompt, 2)
    assert here.blocks.match(wanted).num_blocks == 0
    assert all(elsewhere.blocks.holds(key) for key in wanted.keys)
    assert here.blocks.bring(wanted.keys) == 5
    assert here.blocks.bring(wanted.keys) == 0
    here.add(wanted)
    _step(here)
    assert wanted.num_cached_tokens == 20
    changes = here.blocks.take_changes()
    assert changes is not None
    assert set(changes.kept) == set(wanted.keys)


def test_pulled_blocks_replace_the_longest_idle_and_never_those_in_use() -> None:
    batch = _batch(num_blocks=8)
    batch.add(_sequence("old", range(600, 609), 1))
    _run(batch)
    running = _sequence("running", range(700, 712), 8)
    batch.add(running)
    _step(batch)
    coming = _sequence("coming", range(800, 821), 1)
    batch.blocks.match(coming)
    assert batch.blocks.bring(coming.keys) == batch.blocks.num_free == 5
    batch.check_integrity()
    assert batch.blocks.match(_sequence("again", range(600, 609), 1)).num_blocks == 0


def test_without_a_prefix_cache_nothing_comes() -> None:
    batch = _batch(prefix_cache=False)
    assert batch.blocks.bring([b"key"]) == 0
