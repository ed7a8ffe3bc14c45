"""Blocks pulled from another worker's engine: the same tokens as computed ones make."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.engine.kv.block_file import block_file
from millrace.engine.step.settings import resolve
from millrace.engine.transfer import nixl_agent
from millrace.engine.transfer.nixl_client import NixlConnection
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from tests.engine.checkpoints import save_llama
from tests.engine.kv.peer_world import BLOCK_BYTES, HISTORY, World, ask, rest, resting
from tests.engine.support import drain, prompt, request, resolved, tokens_by_request


@pytest.fixture
def world(llama: tuple[Path, Any], tmp_path: Path) -> Iterator[World]:
    made = World(llama[0], tmp_path / "peers")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("address", "transport"),
    [("", "plain"), ("127.0.0.1:0", "plain"), ("127.0.0.1:0", "auto"), ("", "nixl")],
)
@pytest.mark.parametrize("offload_s", [30.0, 0.0])
def test_a_prefix_that_a_peer_has_is_not_computed(
    world: World, address: str, transport: str, offload_s: float
) -> None:
    peer = world.start(address=address, idle_offload_s=offload_s, transfer_transport=transport)
    expected = ask(peer)
    world.now_s = 10.0
    peer._tables.cached.offload_idle(world.now_s)
    assert bool(peer.stats().num_used_host_blocks) == (offload_s == 0.0)
    source = world.source(peer, host="elsewhere") if address else world.source(peer)
    engine = world.start(transfer_transport=transport)
    tokens, started = world.pull(engine, source, peer)
    assert tokens == expected
    assert (started.num_cached_tokens, started.num_pulled_tokens) == (80, 80)
    stats = engine.stats()
    assert stats.num_pulled_blocks == 5
    assert stats.num_pulled_bytes == 5 * BLOCK_BYTES
    assert (stats.prefix_hit_tokens, stats.peer_hit_tokens) == (80, 80)
    assert 0 < started.pulled_s <= started.queued_s
    assert stats.num_failed_pulls == 0
    assert engine._tiers.exchange is not None
    (idle,) = engine._tiers.exchange._peers._all_idle()
    assert isinstance(idle.connection, NixlConnection) == (transport != "plain")
    assert peer.stats().num_served_blocks == 5
    # Again: what is here is not pulled.
    tokens, started = world.pull(engine, source, peer)
    assert tokens == expected
    assert (started.num_pulled_tokens, started.pulled_s) == (0, 0.0)
    again = engine.stats()
    assert again.num_pulled_blocks == 5
    assert (again.prefix_hit_tokens, again.peer_hit_tokens) == (160, 80)


@pytest.fixture(scope="module")
def exact_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint that the compiled kernels compute."""
    path = tmp_path_factory.mktemp("exact")
    save_llama(
        path,
        vocab_size=448,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
    )
    return path


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"speculation": "ngram"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"quantization": "int4", "kv_cache_dtype": "int8"},
    ],
)
def test_a_stream_goes_on_elsewhere_from_its_own_blocks(
    exact_checkpoint: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    world = World(exact_checkpoint, tmp_path / "peers")
    config = {"dtype": "bfloat16", "kernels": "native"} | config
    _goes_on_elsewhere(world, config)
    world.close()


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_stream_goes_on_elsewhere_with_other_kernels(world: World, kernels: str) -> None:
    _goes_on_elsewhere(world, {"kernels": kernels})


def _goes_on_elsewhere(world: World, config: dict[str, Any]) -> None:
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
    expected = ask(world.start(**config), request("r", HISTORY, **sampled))
    peer = world.start(**config)
    peer.add(request("r", HISTORY, **sampled))
    made: list[int] = []
    while len(made) < 40:
        made += [token for output in peer.step() for token in output.token_ids]
    peer.cancel("r")
    assert made == expected[: len(made)]
    again = request("r", HISTORY, output_token_ids=tuple(made), **sampled)
    engine = world.start(**config)
    tokens, started = world.pull(engine, world.source(peer, len(HISTORY) + len(made)), peer, again)
    assert made + tokens == expected
    assert started.num_pulled_tokens >= 112, "of the tokens that were made there, too"


@pytest.mark.parametrize(
    ("there", "here", "address"),
    [
        ({"tensor_parallel": 2}, {}, ""),
        ({}, {"pipeline_parallel": 2}, "127.0.0.1:0"),
        ({"tensor_parallel": 2}, {"tensor_parallel": 4, "kv_cache_dtype": "int8"}, ""),
    ],
    ids=["two ranks to one", "one rank to two stages, by TCP", "two ranks to four of int8"],
)
def test_a_stream_goes_on_where_the_model_is_split_otherwise(
    exact_checkpoint: Path,
    tmp_path: Path,
    there: dict[str, Any],
    here: dict[str, Any],
    address: str,
) -> None:
    """Four ranks have each head of keys and values twice."""
    both: dict[str, Any] = {
        "transfer_any_ranks": True,
        "num_threads": 1,
        "dtype": "float32",
        "kv_cache_dtype": here.get("kv_cache_dtype", "auto"),
    }
    world = World(exact_checkpoint, tmp_path / "peers")
    peer = world.start(address=address, **both | there)
    engine = world.start(**both | here)
    expected = ask(peer)
    source = world.source(peer, host="elsewhere") if address else world.source(peer)
    tokens, started = world.pull(engine, source, peer)
    assert started.num_pulled_tokens == 80
    assert tokens == expected
    world.close()


def test_blocks_of_a_stream_can_be_pulled_before_it_arrives(world: World) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer)
    source = world.source(peer)
    asked = request("r", HISTORY)
    engine.add(msgspec.structs.replace(asked, request_id="ahead", kv_source=source, warms=True))
    with resting(peer):
        outputs = drain(engine)
    assert [(o.request_id, o.finished, o.token_ids) for o in outputs] == [("ahead", True, ())]
    assert engine.stats().num_pulled_blocks == 5
    peer.rest()
    tokens, started = world.pull(engine, source, peer, asked)
    assert (tokens, started.num_pulled_tokens) == (expected, 80), "for this one"
    assert engine.stats().num_pulled_blocks == 5, "they were there"
    tokens, started = world.pull(engine, source, peer, request("r", HISTORY))
    assert (tokens, started.num_pulled_tokens) == (expected, 0), "it had been used"
    engine.check_integrity()


def test_empty_pull_ahead_ends_at_once_and_one_from_a_lost_peer_soon(world: World) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer)
    asked = request("r", HISTORY)
    engine.add(msgspec.structs.replace(asked, request_id="ahead", warms=True))
    assert [o.finished for o in engine.step()] == [True]
    source = world.source(peer, token="other")
    engine.add(msgspec.structs.replace(asked, request_id="ahead", kv_source=source, warms=True))
    assert [o.finished for o in drain(engine)] == [True]
    assert engine.stats().num_failed_pulls == 1
    assert ask(engine, asked) == expected
    engine.check_integrity()


def test_cache_that_cannot_be_mapped_is_read_through_host_memory(world: World) -> None:
    """The cache of a GPU, for example, cannot be mapped by a peer."""
    peer, engine = world.start(lends_cache=False), world.start()
    assert peer._runner.cache.pages is None
    expected = ask(peer)
    tokens, started = world.pull(engine, world.source(peer), peer)
    assert (tokens, started.num_pulled_tokens) == (expected, 80)
    assert peer.stats().num_offloaded_blocks == 5
    # Some of it is there already.
    longer = HISTORY + prompt(8, 40)
    expected = ask(peer, request("r", longer))
    tokens, started = world.pull(engine, world.source(peer), peer, request("r", longer))
    assert (tokens, started.num_pulled_tokens) == (expected, 48)


def test_another_s_prompt_under_the_same_words_is_not_found(world: World) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer, request("r", HISTORY, cache_salt="acme"))
    source = world.source(peer)
    for salt, num_pulled in (("", 0), ("other", 0), ("acme", 80)):
        asked = request("r", HISTORY, cache_salt=salt)
        tokens, started = world.pull(engine, source, peer, asked)
        assert (tokens, started.num_pulled_tokens) == (expected, num_pulled)
    assert engine.stats().num_failed_pulls == 0


def test_blocks_of_another_layout_are_not_asked_for(world: World) -> None:
    peer, engine = world.start(kv_cache_dtype="int8"), world.start()
    ask(peer)
    expected = ask(world.start())
    tokens, started = world.pull(engine, world.source(peer), peer)
    assert (tokens, started.num_pulled_tokens) == (expected, 0)
    assert engine.stats().num_failed_pulls == 0


def test_blocks_that_come_already_are_not_asked_for_again(world: World) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer)
    source = world.source(peer)
    for name in "abc":
        engine.add(msgspec.structs.replace(request(name, HISTORY), kv_source=source))
    engine.add(msgspec.structs.replace(request("n", HISTORY, n=3), kv_source=source))
    with resting(peer):
        outputs = drain(engine)
    tokens = tokens_by_request(outputs)
    assert [tokens[name] for name in "abc"] == [expected] * 3
    assert [o.num_pulled_tokens for o in outputs if o.started][:3] == [80] * 3
    assert engine.stats().num_pulled_blocks == 5


def test_a_peer_is_asked_for_what_it_is_said_to_have(world: World) -> None:
    peer, engine = world.start(num_blocks=60), world.start(num_blocks=60)
    asked = request("r", prompt(4, 450))
    expected = ask(peer, asked)
    tokens, started = world.pull(engine, world.source(peer, 32), peer, asked)
    # A few more than that: it may have computed on since.
    assert (tokens, started.num_pulled_tokens) == (expected, (2 + 16) * 16)


def test_blocks_that_are_computed_sooner_are_not_pulled(world: World) -> None:
    peer, engine = world.start(), world.start()
    expected = ask(peer)
    engine._tiers.arrivals._compute_s = lambda num_tokens: num_tokens * 1e-6
    tokens, started = world.pull(engine, world.source(peer), peer)
    assert (tokens, started.num_pulled_tokens) == (expected, 0)
    engine._tiers.arrivals._compute_s = lambda num_tokens: num_tokens * 1.0
    other = request("r", prompt(5, 90))
    expected = ask(peer, other)
    assert world.pull(engine, world.source(peer), peer, other)[1].num_pulled_tokens == 80


@pytest.mark.parametrize("is_disk_faster", [False, True])
def test_a_block_comes_from_where_it_comes_faster(
    world: World, tmp_path: Path, is_disk_faster: bool
) -> None:
    peer, engine = world.start(), world.start(idle_offload_s=1.0)
    settings = resolved(
        world.model, num_blocks=24, device="cpu", disk_cache_path=str(tmp_path / "disk")
    )
    runner = engine._runner
    engine.keep_on_disk(
        block_file(world.model, settings, runner.cache, is_row_exact=runner.is_row_exact)
    )
    expected = ask(peer)
    ask(engine, request("r", HISTORY[:50]))
    world.now_s += 100.0
    rest(engine)
    # On disk alone, as after a restart.
    host = engine._tables.host
    assert host is not None
    host.give_back(host.reserve(host.num_slots))
    assert engine._tiers.disk is not None
    engine._tiers.disk.bytes_per_s = 1e12 if is_disk_faster else 1e6
    tokens, started = world.pull(engine, world.source(peer), peer)
    assert (tokens, started.num_cached_tokens) == (expected, 80)
    assert started.num_pulled_tokens == (32 if is_disk_faster else 80)
    stats = engine.stats()
    assert stats.num_read_blocks == (3 if is_disk_faster else 0)
    assert stats.disk_hit_tokens == (48 if is_disk_faster else 0)
    assert (stats.host_hit_tokens, stats.peer_hit_tokens) == (0, started.num_pulled_tokens)
    engine._tiers.disk._file.close()


def test_nothing_is_pulled_from_oneself(world: World) -> None:
    engine = world.start()
    expected = ask(engine)
    other = world.start()
    source = world.source(other)
    tokens, started = world.pull(other, source, engine)
    assert (tokens, started.num_pulled_tokens) == (expected, 0)
    assert other.stats().num_failed_pulls == 0


def test_only_both_sides_take_blocks_of_other_ranks(world: World) -> None:
    plain, any_ranks = world.start(), world.start(transfer_any_ranks=True)
    others = world.start(transfer_any_ranks=True, num_threads=2)
    layouts = [
        endpoint.layout
        for engine in (plain, any_ranks, others)
        if (endpoint := engine.transfer_endpoint) is not None
    ]
    assert layouts[0] != layouts[1] == layouts[2]


def test_transfer_is_resolved_by_the_settings(llama: tuple[Path, Any], tmp_path: Path) -> None:
    path = llama[0]

    def decided(*, among_others: bool = True, **config: Any) -> bool | None:
        return resolve(path, EngineConfig(**config), among_others=among_others).transfer

    assert decided() is True
    assert decided(among_others=False) is False
    assert decided(among_others=False, transfer=True) is True
    assert decided(transfer=False) is False
    for config in (
        {"prefix_cache": False},
        {"host_cache_bytes": 0},
        {"load_format": "dummy"},
    ):
        assert decided(**config) is False
        with pytest.raises(ConfigError, match=r"engine\.transfer: "):
            decided(transfer=True, **config)
        with pytest.raises(ConfigError, match=r"engine\.transfer_address: "):
            decided(transfer_address="127.0.0.1:0", **config)
        with pytest.raises(ConfigError, match=r"engine\.transfer_any_ranks: "):
            decided(transfer_any_ranks=True, **config)
        with pytest.raises(ConfigError, match=r"engine\.transfer_transport: "):
            decided(transfer_transport="auto", **config)
    with pytest.raises(ConfigError, match="which is off"):
        decided(transfer=False, transfer_address="127.0.0.1:0")
    with pytest.raises(ConfigError, match="which is off"):
        decided(transfer=False, transfer_any_ranks=True)
    with pytest.raises(ConfigError, match="which is off"):
        decided(transfer=False, transfer_transport="nixl")


def test_nixl_is_refused_without_the_package_and_left_out_where_it_may_be(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_agent, "find_spec", lambda _: None)
    config = EngineConfig(transfer_transport="nixl")
    with pytest.raises(ConfigError, match=r"millrace\[rdma\]"):
        resolve(world.model, config, among_others=True)
    config = msgspec.structs.replace(config, transfer_transport="auto")
    assert resolve(world.model, config, among_others=True).transfer is True
    peer = world.start(address="127.0.0.1:0", transfer_transport="auto")
    assert caplog.text.count("exchanged without NIXL") == 1
    expected = ask(peer)
    source = world.source(peer, host="elsewhere")
    assert not source.endpoint.nixl
    tokens, started = world.pull(world.start(transfer_transport="plain"), source, peer)
    assert (tokens, started.num_pulled_tokens) == (expected, 80)
