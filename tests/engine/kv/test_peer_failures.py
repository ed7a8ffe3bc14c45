"""Peers that are slow, gone, wrong or in need of what they lent cost no token and no block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.engine.kv.lending import LOAN_S
from millrace.engine.types import EngineOutput
from tests.engine.kv.peer_world import BLOCK_BYTES, HISTORY, World, ask, rest, resting
from tests.engine.support import drain, prompt, request, tokens_by_request


@pytest.fixture
def world(llama: tuple[Path, Any], tmp_path: Path) -> Iterator[World]:
    made = World(llama[0], tmp_path / "peers")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("address", "transport"),
    [("", "plain"), ("127.0.0.1:0", "plain"), ("127.0.0.1:0", "nixl")],
)
def test_a_wrong_token_or_layout_is_told_nothing(
    world: World, address: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {"address": address, "transfer_transport": transport}
    peer = world.start(**config)
    other = world.start(kv_cache_dtype="int8", **config)
    expected = ask(peer)
    endpoint: dict[str, Any] = {"host": "elsewhere"} if address else {}
    for source, why in (
        (world.source(peer, token="guessed", **endpoint), "it has no right to read here"),
        (
            world.source(other, layout=world.source(peer).endpoint.layout, **endpoint),
            "its blocks are of another layout",
        ),
    ):
        engine = world.start(transfer_transport=transport)
        tokens, started = world.pull(engine, source, peer)
        assert (tokens, started.num_pulled_tokens) == (expected, 0)
        assert engine.stats().num_failed_pulls == 1
        assert caplog.text.count(why) == 1
        engine.check_integrity()


def test_a_peer_that_is_gone_costs_no_token_and_is_left_alone_for_a_while(world: World) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer)
    source = world.source(peer)
    assert world.pull(engine, source, peer, request("r", HISTORY[:20]))[1].num_pulled_tokens == 16
    assert peer._tiers.exchange is not None
    peer._tiers.exchange.close()
    for num_failed in (1, 1):
        tokens, started = world.pull(engine, source, peer, request("r", HISTORY))
        assert tokens == expected
        assert started.num_pulled_tokens == 0
        assert engine.stats().num_failed_pulls == num_failed
    world.now_s += 6.0
    world.pull(engine, source, peer, request("r", prompt(2, 90)))
    assert engine.stats().num_failed_pulls == 2
    engine.check_integrity()


def test_failed_pull_ahead_may_be_asked_for_again(world: World) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer)
    source = world.source(peer)
    assert peer._tiers.exchange is not None
    peer._tiers.exchange.close()
    ahead = msgspec.structs.replace(request("ahead", HISTORY), kv_source=source, warms=True)
    engine.add(ahead)
    drain(engine)
    assert engine.stats().num_failed_pulls == 1
    assert world.pull(engine, source, peer, request("r", HISTORY))[0] == expected
    assert engine.stats().num_failed_pulls == 2, "it was asked"
    engine.check_integrity()


def test_a_slow_peer_holds_up_a_prompt_for_a_while_only(world: World) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer)
    engine.add(msgspec.structs.replace(request("r", HISTORY), kv_source=world.source(peer)))
    assert engine.step() == []
    others = request("s", prompt(3, 40))
    engine.add(others)
    drained: list[EngineOutput] = []
    while not any(o.finished for o in drained):
        drained += engine.step()
    assert tokens_by_request(drained)["s"], "others go on"
    world.now_s += 3.0
    assert tokens_by_request(drain(engine))["r"] == expected
    # What comes too late is kept for others.
    with resting(peer):
        rest(engine)
    assert engine.stats().num_pulled_blocks == 5
    engine.check_integrity()


def test_blocks_that_may_be_torn_are_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer)
    client = "millrace.engine.transfer.client"

    def slow(source: Any, target: Any, runs: Any) -> None:
        """Let the peer's loan end and the peer overwrite the lent blocks, before the copy."""
        world.now_s += LOAN_S + 1.0
        peer.rest()
        peer._runner.cache.blocks.fill_(0x3F)
        for from_, to, count in runs:
            target[:, to : to + count] = source[:, from_ : from_ + count]

    monkeypatch.setattr(f"{client}.copy_runs", slow)
    engine.add(msgspec.structs.replace(request("r", HISTORY), kv_source=world.source(peer)))
    peer_rests = resting(peer)
    with peer_rests:
        outputs = drain(engine)
    assert tokens_by_request(outputs)["r"] == expected
    rest(engine)
    assert engine.stats().num_pulled_blocks == 0
    assert engine.stats().num_failed_pulls == 1
    peer.check_integrity()
    engine.check_integrity()


def test_lent_blocks_are_not_overwritten(world: World) -> None:
    peer = world.start()
    ask(peer)
    exchange = peer._tiers.exchange
    assert exchange is not None
    keys = list(peer._tables.cached._index._block_of)[:5]
    loan = exchange.lending.ask(keys)
    peer.rest()
    blocks = [place & 0x7FFFFFFF for place in loan.wait(1.0)]
    assert len(blocks) == 5
    before = peer._runner.cache.blocks[:, blocks].clone()
    peer.check_integrity()
    for seed in range(2, 6):
        ask(peer, request("r", prompt(seed, 200), max_tokens=80))
    assert (peer._runner.cache.blocks[:, blocks] == before).all()
    assert loan.end()
    peer.rest()
    peer.check_integrity()
    assert peer.stats().num_free_blocks == 24
    ask(peer, request("r", prompt(7, 250), max_tokens=100))
    assert not (peer._runner.cache.blocks[:, blocks] == before).all()


def test_a_request_that_needs_what_is_lent_waits_for_it(world: World) -> None:
    peer = world.start()
    ask(peer)
    exchange = peer._tiers.exchange
    assert exchange is not None
    loan = exchange.lending.ask(list(peer._tables.cached._index._block_of)[:5])
    peer.rest()
    assert len(loan.wait(1.0)) == 5
    peer.add(request("r", prompt(2, 300), max_tokens=84))  # all 24 blocks
    outputs = []
    for _ in range(100):
        outputs += peer.step()
        peer.check_integrity()
    assert not any(output.finished for output in outputs)
    world.now_s += LOAN_S + 1.0
    outputs += drain(peer)
    assert len(tokens_by_request(outputs)["r"]) == 84
    assert not loan.end(), "it is told that it was too late"


def test_host_memory_that_has_no_room_takes_what_it_can(world: World) -> None:
    peer = world.start()
    engine = world.start(host_cache_bytes=3 * BLOCK_BYTES)
    expected = ask(peer)
    tokens, started = world.pull(engine, world.source(peer), peer)
    assert (tokens, started.num_pulled_tokens) == (expected, 48)


def test_request_cancelled_while_blocks_arrive_leaves_nothing(world: World) -> None:
    peer, engine = world.start(), world.start()
    ask(peer)
    engine.add(msgspec.structs.replace(request("gone", HISTORY), kv_source=world.source(peer)))
    engine.cancel("gone")
    assert not engine.has_work
    with resting(peer):
        rest(engine)
    assert engine.stats().num_used_host_blocks == 5
    engine.check_integrity()
