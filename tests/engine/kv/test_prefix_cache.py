"""Prefix cache: a common beginning of prompts is computed once, and the tokens stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.kv.block_pool import BlockPool
from millrace.engine.kv.prefix_cache import PrefixCache
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput
from millrace.schemas.config import EngineConfig
from millrace.schemas.prefix import extend_keys, root_key
from tests.engine.conftest import MakeEngine
from tests.engine.support import (
    drain,
    embedding_of,
    last_by_request,
    prompt,
    request,
    tokens_by_request,
)

SYSTEM = prompt(1, 70)  # four full blocks and six tokens


def keys_of(token_ids: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    size = 4
    num_blocks = len(token_ids) // size
    extend_keys(keys, root_key(salt), token_ids, num_blocks=num_blocks, block_size_tokens=size)
    return keys


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.integers(0, 3), max_size=20),
    st.sampled_from(["", "a"]),
)
def test_keys_are_equal_just_when_salt_and_all_tokens_so_far_are(
    left: list[int], right: list[int], salt: str
) -> None:
    ours, theirs = keys_of(left), keys_of(right, salt)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        end = 4 * (index + 1)
        assert (mine == other) == (left[:end] == right[:end] and not salt)


def test_keys_grow_in_any_portions() -> None:
    token_ids = prompt(5, 64)
    keys: list[bytes] = []
    for num_blocks in (0, 1, 1, 7, 16):
        extend_keys(keys, root_key(""), token_ids, num_blocks=num_blocks, block_size_tokens=4)
    assert keys == keys_of(token_ids)


@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 22])
def test_the_cache_is_emptied_but_for_what_runs(
    make_engine: MakeEngine, host_cache_bytes: int
) -> None:
    engine = make_engine(host_cache_bytes=host_cache_bytes, idle_offload_s=0.0)

    def num_cached(name: str, *token_ids: int) -> int:
        engine.add(request(name, [*SYSTEM, *token_ids], max_tokens=2))
        return last_by_request(drain(engine))[name].num_cached_tokens

    num_cached("a", 5)
    assert engine._pool.num_idle_blocks or host_cache_bytes
    engine.pop_prefix_changes()
    engine.reset_prefix_cache()
    engine.check_integrity()
    assert engine._pool.num_idle_blocks == 0
    changes = engine.pop_prefix_changes()
    assert changes is not None
    assert len(changes.removed) >= 4 * 8
    assert not changes.added
    engine.add(request("b", [*SYSTEM, 6], max_tokens=200))
    started = [output for _ in range(4) for output in engine.step()]
    assert [one.num_cached_tokens for one in started if one.started] == [0]
    engine.reset_prefix_cache()
    engine.check_integrity()
    engine.add(request("c", [*SYSTEM, 7], max_tokens=2))
    outputs: list[EngineOutput] = []
    while not any(one.request_id == "c" and one.finished for one in outputs):
        outputs += engine.step()
    assert max(one.num_cached_tokens for one in outputs if one.request_id == "c") == 64
    engine.cancel("b")
    drain(engine)
    engine.reset_prefix_cache()
    engine.check_integrity()
    assert num_cached("d", 8) == 0


def test_the_longest_idle_block_is_evicted_first() -> None:
    cache = PrefixCache()
    pool = BlockPool(3, 4, cache.evict)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block in blocks:
        cache.insert(bytes([block]), block)
        pool.keep(block)
    pool.free(reversed(blocks))
    assert (pool.num_free_blocks, pool.num_idle_blocks) == (3, 3)
    pool.share(blocks[2])  # was idle for longest, but is wanted again
    assert pool.allocate(1) == [blocks[1]]
    assert [cache.get(bytes([block])) for block in blocks] == [blocks[0], None, blocks[2]]
    assert cache.num_evicted_blocks == 1
    cache.check_integrity(pool.kept_blocks())
    pool.check_integrity()


def test_a_block_is_found_by_the_first_that_computed_it() -> None:
    cache = PrefixCache()
    assert cache.insert(b"key", 1)
    assert not cache.insert(b"key", 2)
    assert cache.get(b"key") == 1


@pytest.fixture(scope="module")
def cold(llama: tuple[Path, Any]) -> Any:
    """Return the tokens of a prompt computed without any cache."""
    config = EngineConfig(num_blocks=128, device="cpu", prefix_cache=False, host_cache_bytes=0)
    engine = Engine.load(llama[0], config)

    def tokens(token_ids: list[int], **params: Any) -> list[int]:
        engine.add(request("r", token_ids, **params))
        return tokens_by_request(drain(engine))["r"]

    return tokens


@pytest.mark.parametrize("num_tokens", [70, 64, 65, 80, 81, 17, 16, 15])
def test_cold_and_warm_give_the_same_tokens(
    make_engine: MakeEngine, cold: Any, num_tokens: int
) -> None:
    token_ids = [*SYSTEM, *prompt(2, 40)][:num_tokens]
    engine = make_engine()
    for name in ("cold", "warm"):
        engine.add(request(name, token_ids))
        outputs = drain(engine)
        assert tokens_by_request(outputs)[name] == cold(token_ids)
        started = next(o for o in outputs if o.started)
        cached = 0 if name == "cold" else (num_tokens - 1) // 16 * 16
        assert started.num_cached_tokens == cached
    stats = engine.stats()
    assert stats.prefix_query_tokens == 2 * num_tokens
    assert stats.prefix_hit_tokens == (num_tokens - 1) // 16 * 16


def test_a_conversation_goes_on_from_its_own_answers(make_engine: MakeEngine, cold: Any) -> None:
    engine = make_engine()
    history = SYSTEM
    for turn in range(3):
        engine.add(request("turn", history, max_tokens=20))
        outputs = drain(engine)
        answer = tokens_by_request(outputs)["turn"]
        assert answer == cold(history, max_tokens=20)
        started = next(o for o in outputs if o.started)
        # All but the last token of the answer before was computed.
        assert started.num_cached_tokens == (0 if turn == 0 else (len(history) - 11) // 16 * 16)
        history = [*history, *answer, *prompt(turn, 10)]


def test_streams_that_arrive_together_compute_their_prefix_once(
    make_engine: MakeEngine, cold: Any
) -> None:
    engine = make_engine(max_batch_tokens=48)
    prompts = {f"r{i}": [*SYSTEM[:64], *prompt(10 + i, 9)] for i in range(6)}
    for name, token_ids in prompts.items():
        engine.add(request(name, token_ids))
    tokens = tokens_by_request(drain(engine))
    assert engine.stats().prefill_tokens == 64 + 6 * 9
    assert tokens == {name: cold(token_ids) for name, token_ids in prompts.items()}


def test_salts_keep_tenants_apart(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for name, salt in (("a", "acme"), ("b", "globex"), ("c", ""), ("d", "acme")):
        engine.add(request(name, SYSTEM, cache_salt=salt))
        started = next(o for o in drain(engine) if o.started)
        assert started.num_cached_tokens == (64 if name == "d" else 0)


def test_without_the_cache_nothing_is_found(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    for _ in range(2):
        engine.add(request("r", SYSTEM))
        assert all(o.num_cached_tokens == 0 for o in drain(engine))
    stats = engine.stats()
    assert (stats.prefix_hit_tokens, stats.num_idle_blocks) == (0, 0)


def test_prompt_logprobs_take_no_hits_but_leave_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for _ in range(2):
        engine.add(request("r", SYSTEM, prompt_logprobs=0))
        assert all(o.num_cached_tokens == 0 for o in drain(engine))
    engine.add(request("r", SYSTEM))
    assert next(o for o in drain(engine) if o.started).num_cached_tokens == 64


def test_a_preempted_sequence_finds_its_own_blocks(make_engine: MakeEngine, cold: Any) -> None:
    engine = make_engine(num_blocks=20, max_num_sequences=1, host_cache_bytes=0)
    engine.add(request("low", SYSTEM, max_tokens=30))
    outputs = [o for _ in range(8) for o in engine.step()]
    engine.add(request("high", prompt(8, 20), priority=1))
    outputs += drain(engine)
    tokens, last = tokens_by_request(outputs), last_by_request(outputs)
    assert last["low"].num_preemptions == 1
    assert list(last) == ["high", "low"]
    assert tokens["low"] == cold(SYSTEM, max_tokens=30)
    # 77 tokens were computed when it lost its slot; the last 13 of them twice.
    assert engine.stats().prefix_hit_tokens == 64


def test_poison_is_never_cached(make_engine: MakeEngine, cold: Any) -> None:
    clean = [token for token in range(150) if token != 77]
    engine = make_engine(max_batch_tokens=32)
    embedding = embedding_of(engine)
    kept = embedding[77].clone()
    embedding[77] = float("nan")
    token_ids = [*clean[:40], 77, *clean[40:90]]
    for _ in range(2):
        engine.add(request("bad", token_ids))
        outputs = drain(engine)
        error = last_by_request(outputs)["bad"].error
        assert error is not None
        assert error[0] == "non_finite_logits"
    # What went before the poison was finite, and is there; nothing behind it is.
    assert next(o for o in outputs if o.started).num_cached_tokens == 32
    assert bool(torch.isfinite(engine._runner.cache.data).all())
    embedding[77] = kept
    engine.add(request("good", token_ids))
    assert tokens_by_request(drain(engine))["good"] == cold(token_ids)
