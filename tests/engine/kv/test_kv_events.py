"""KV events: blocks that enter or leave the engine's prefix cache."""

from __future__ import annotations

import random
from typing import Any

from millrace.engine.kv.prefix_cache import KvEvents
from millrace.engine.scheduling.cost_model import CostModel, StepSpeed, StepWork
from millrace.engine.step.engine import Engine
from millrace.engine.types import PrefixChanges
from millrace.schemas.prefix import extend_keys, root_key
from tests.engine.conftest import MakeEngine
from tests.engine.support import drain, prompt, request


def keys_of(token_ids: list[int], num_blocks: int, salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(salt), token_ids, num_blocks=num_blocks, block_size_tokens=16)
    return [key[:8] for key in keys]


def split(joined: bytes) -> list[bytes]:
    return [joined[i : i + 8] for i in range(0, len(joined), 8)]


def kept_by(engine: Engine) -> set[bytes]:
    return {key[:8] for key in engine._tables.cached.kept_keys()}


class Mirror:
    """Keys of a prefix cache, as known to a listener to all changes."""

    def __init__(self) -> None:
        self.known: dict[bytes, None] = {}

    def hear(self, changes: PrefixChanges | None) -> None:
        if changes is None:
            return
        if changes.whole:
            self.known.clear()
        for key in split(changes.added):
            self.known.pop(key, None)
            self.known[key] = None
        for key in split(changes.removed):
            self.known.pop(key, None)


def test_blocks_of_prompts_and_answers_are_told(make_engine: MakeEngine) -> None:
    engine, mirror = make_engine(), Mirror()
    assert engine.pop_prefix_changes() is None
    tokens = prompt(1, 70)
    engine.add(request("a", tokens, max_tokens=30))
    tokens += [token for output in drain(engine) for token in output.token_ids]
    mirror.hear(engine.pop_prefix_changes())
    assert list(mirror.known) == keys_of(tokens, 6)[::-1], "the head of a prompt is worth most"
    assert engine.pop_prefix_changes() is None


def test_evicted_blocks_are_told(make_engine: MakeEngine) -> None:
    engine, mirror = make_engine(num_blocks=12, host_cache_bytes=0), Mirror()
    generator = random.Random(7)
    for number in range(30):
        length = generator.randrange(20, 120)
        engine.add(request(str(number), prompt(generator.randrange(4), length), max_tokens=8))
        if number % 3 == 0:
            drain(engine)
        else:
            for _ in range(generator.randrange(4)):
                if engine.has_work:
                    engine.step()
        mirror.hear(engine.pop_prefix_changes())
        assert set(mirror.known) == kept_by(engine)
    assert engine.stats().num_evicted_blocks > 0


def test_what_only_host_memory_has_counts_as_kept(make_engine: MakeEngine) -> None:
    engine, mirror = make_engine(num_blocks=12, idle_offload_s=0.0), Mirror()
    for number in range(6):
        engine.add(request(str(number), prompt(number, 100), max_tokens=4))
        drain(engine)
        mirror.hear(engine.pop_prefix_changes())
        assert set(mirror.known) == kept_by(engine)
    assert engine.stats().num_used_host_blocks > 0
    assert len(mirror.known) > 12
    assert set(keys_of(prompt(0, 100), 6)) <= set(mirror.known)


def test_tenants_have_keys_of_their_own(make_engine: MakeEngine) -> None:
    engine, mirror = make_engine(), Mirror()
    tokens = prompt(1, 40)
    engine.add(request("a", tokens, cache_salt="acme", max_tokens=2))
    drain(engine)
    mirror.hear(engine.pop_prefix_changes())
    assert set(mirror.known) == set(keys_of(tokens, 2, "acme"))


def test_without_a_prefix_cache_there_is_nothing_to_tell(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    engine.add(request("a", prompt(1, 40)))
    drain(engine)
    assert engine.pop_prefix_changes() is None


def test_overflow_of_changes_is_reported_as_the_whole_cache() -> None:
    kept = {bytes([number]) * 16: None for number in range(9)}
    log = KvEvents(kept.__contains__, lambda: kept, max_noted=4)
    for key in kept:
        log.record(key)
    log.record(next(iter(kept)))
    changes = log.pop()
    assert changes is not None
    assert changes.whole
    assert split(changes.added) == [bytes([number]) * 8 for number in range(5, 9)]
    assert log.pop() is None


def warm_costs() -> CostModel:
    """Set the costs to 10 ms a step, 1 ms a decoding sequence and 0.1 ms a token of a prompt."""
    costs = CostModel()
    for number in range(200):
        prefill, decodes = (number * 37) % 300, (number * 7) % 20
        costs.observe(StepWork(prefill, decodes), 0.01 + 1e-3 * decodes + 1e-4 * prefill)
    return costs


def speed_of(costs: CostModel, works: list[tuple[StepWork, float]]) -> StepSpeed:
    speed = StepSpeed(costs)
    for work, step_s in [(StepWork(1, 0), 5.0)] * 2 + works:
        speed.observe(work, step_s)
    return speed


def test_nothing_measured_is_zero() -> None:
    speed = speed_of(CostModel(), [])
    assert (speed.prefill_tokens_per_s, speed.decode_step_ms) == (0.0, 0.0)


def test_steps_of_one_kind_are_that_kind_s() -> None:
    speed = speed_of(CostModel(), [(StepWork(200), 0.1), (StepWork(0, 8), 0.02)] * 5)
    assert abs(speed.prefill_tokens_per_s - 2_000) < 1
    assert abs(speed.decode_step_ms - 20) < 0.01


def test_a_step_that_does_both_is_divided() -> None:
    speed = speed_of(warm_costs(), [(StepWork(100, 10), 0.03)] * 5)
    assert 9_000 < speed.prefill_tokens_per_s < 11_000
    assert 18 < speed.decode_step_ms < 22


def test_outstanding_prompts_are_those_that_are_not_computed(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=32, max_num_sequences=2)
    seen: list[Any] = []
    engine.add(request("a", prompt(1, 80), max_tokens=4))
    engine.add(request("b", prompt(2, 40), max_tokens=4))
    seen.append(engine.stats().outstanding_prompt_tokens)
    while engine.has_work:
        engine.step()
        seen.append(engine.stats().outstanding_prompt_tokens)
    assert seen[0] == 120
    assert seen == sorted(seen, reverse=True)
    assert 0 < seen[1] < 120
    assert seen[-1] == 0
