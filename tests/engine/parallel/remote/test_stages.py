"""Groups with stages computed by ``millrace stages``, compared with one rank: real processes, over
loopback."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from millrace.engine.parallel.cpu_runner import GroupRunner
from millrace.engine.parallel.device_runner import DeviceGroupRunner
from millrace.engine.parallel.members import Members
from millrace.engine.parallel.ranks import RankLostError
from millrace.engine.parallel.remote import host as hosts
from millrace.engine.parallel.remote import stage as cpu_stage
from millrace.engine.parallel.remote import stage as device_stage
from millrace.engine.parallel.remote.connection import StageRefusedError
from millrace.engine.parallel.remote.host import Joining, StageHost
from millrace.engine.parallel.remote.lead import RemoteMember
from millrace.engine.step.engine import Engine
from millrace.schemas.errors import AdapterError, ConfigError
from millrace.schemas.models.adapters import AdapterRef
from tests.engine.adapters.saved import engine_adapter, save_adapter, with_adapter
from tests.engine.checkpoints import save_model
from tests.engine.parallel.shapes import SHAPE
from tests.engine.parallel.test_group import ask_all, load
from tests.engine.support import drain, prompt, request, tokens_by_request
from tests.support.engine.stages import Stages, WarmStages
from tests.support.engine.warm_fixture import warm_processes as warm_processes
from tests.support.servers import free_port
from tests.support.waiting import eventually

TOKEN = "stages-of-tests"
NAN_TOKEN = 202
RANK_TIMEOUT_S = 4.0
TWO_OF_THREE = {"pipeline_parallel": 3, "remote_stages": 2}
# Ranks as on GPUs, which compute on the CPU here.
DEVICES = {"kernels": "reference", "cuda_graphs": False}


pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama")
    return path, save_model(path, "Llama", **SHAPE, vocab_size=203, nan_token=NAN_TOKEN)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def joined(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    """Start a host of two stages, whose ranks are forks. Ranks of the host that a test kills are
    not forks."""
    folder = tmp_path_factory.mktemp("stages")
    (folder / "token").write_text(f"{TOKEN}\n")
    host = WarmStages(
        folder / "log",
        *("--join", f"127.0.0.1:{port}", "--token-file", str(folder / "token")),
        *("--max-stages", "2"),
    )
    yield host
    ranks = host.ranks()
    assert host.stop() == 0
    assert not [rank for rank in ranks if rank.is_running()]


def load_remote(path: Path, port: int, ranks: int = 1, **changes: Any) -> Engine:
    # A host is free again when the group that it was in has ended.
    gc.collect()
    settings: dict[str, Any] = {
        "pipeline_parallel": 2,
        "remote_stages": 1,
        "stages_address": f"127.0.0.1:{port}",
        "stages_token": TOKEN,
        "rank_timeout_s": RANK_TIMEOUT_S,
        "start_timeout_s": 30.0,
    }
    return load(path, ranks, **settings | changes)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, {}, id="two stages of two ranks"),
        pytest.param(1, TWO_OF_THREE, id="two remote of three"),
        pytest.param(2, DEVICES, id="two stages of two devices"),
        pytest.param(1, DEVICES | TWO_OF_THREE, id="two remote of three, of devices"),
    ],
)
@pytest.mark.usefixtures("joined")
def test_all_kinds_of_requests_run_on_remote_stages(
    llama: tuple[Path, Any], port: int, tmp_path: Path, ranks: int, settings: dict[str, Any]
) -> None:
    """The requests are several choices, beams, adapters, cached prefixes, prompts with non-finite
    numbers, and preempted requests whose blocks are in the hosts' memory meanwhile."""
    path, model = llama
    save_adapter(tmp_path / "adapter", model, strength=4.0)
    adapter = engine_adapter(tmp_path / "adapter")
    long = prompt(7, 100, 199)
    asked = [
        request("many", prompt(2, 20, 199), n=3, temperature=1.0, seed=5),
        request("beams", prompt(5, 20, 199), n=3, use_beam_search=True),
        request("not finite", [*prompt(3, 40, 199), NAN_TOKEN, 5]),
        with_adapter(adapter, request("adapted", prompt(3, 20, 199))),
        *(request(f"long {i}", prompt(20 + i, 30, 199), max_tokens=120) for i in range(5)),
    ]
    alike = DEVICES.keys() & settings
    made = []
    for remote in (False, True):
        how = {"num_blocks": 24, "max_adapters": 2, "max_batch_tokens": 32}
        if remote:
            engine = load_remote(path, port, ranks, **how | settings)
        else:
            engine = load(path, 1, **how | {name: settings[name] for name in alike})
        outputs = ask_all(engine, asked)
        # The blocks of what was not finite are used again.
        outputs += ask_all(engine, [request(f"next {i}", prompt(i, 100, 199)) for i in range(3)])
        outputs += ask_all(engine, [request("again", [*long, 1, 2])])
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.prefix_hit_tokens > 0
        assert stats.num_offloaded_blocks > 0
        made.append(outputs)
    alone, together = made
    failed = [[one.request_id for one in outputs if one.error] for outputs in made]
    assert failed[0] == failed[1]
    assert "not finite" in failed[1]
    assert _tokens(together) == _tokens(alone)


def _tokens(outputs: list[Any]) -> dict[tuple[str, int], list[int]]:
    """Collect tokens by request and choice."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        tokens.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    return tokens


def kill_rank(joined: Stages, _: Engine) -> None:
    [rank] = joined.ranks()
    rank.kill()


def members_of(engine: Engine) -> Members:
    runner = engine._runner
    if isinstance(runner, DeviceGroupRunner):
        return runner._lead.members
    assert isinstance(runner, GroupRunner)
    return runner.members


def cut(_: Stages, engine: Engine) -> None:
    [member] = members_of(engine)._members
    assert isinstance(member, RemoteMember)
    member._relay._connection.reading.sock.shutdown(socket.SHUT_RDWR)


def stop_host(joined: Stages, _: Engine) -> None:
    psutil.Process(joined.pid).send_signal(signal.SIGSTOP)


FAULTS: list[tuple[Callable[[Stages, Engine], None], str]] = [
    (kill_rank, r"rank 1 \(at .*\) is gone: .* says: rank 1 \(process \d+\) .* exit code -9"),
    (cut, r"rank 1 \(at .*\) is gone: the connection to .* has ended"),
    (stop_host, "it takes too long|in time|Timed out waiting"),
]


@pytest.mark.parametrize("settings", [{}, DEVICES], ids=["ranks", "devices"])
async def test_end_of_a_group_is_reported_and_the_host_serves_the_next(
    llama: tuple[Path, Any], port: int, joined: Stages, settings: dict[str, Any]
) -> None:
    asked = request("r", prompt(1, 20, 199), max_tokens=30)
    for fail, message in FAULTS:
        engine = load_remote(llama[0], port, **settings)
        ranks = joined.ranks()
        engine.add(asked)
        engine.step()
        try:
            fail(joined, engine)
            with pytest.raises(RankLostError, match=message):
                drain(engine)
        finally:
            psutil.Process(joined.pid).send_signal(signal.SIGCONT)
        del engine
        gc.collect()
        await eventually(lambda gone=ranks: not [rank for rank in gone if rank.is_running()])
    again = load_remote(llama[0], port, max_adapters=1, **settings)
    assert len(tokens_by_request(ask_all(again, [asked]))["r"]) == 30
    # Of an adapter that is not at the host its rank says so.
    members = members_of(again)
    number = members.load_adapter(AdapterRef(name="a", version="1", source="/nowhere"), 8)
    with pytest.raises(AdapterError, match=r"rank 1: .*/nowhere"):
        members.wait_loaded(number)


async def test_a_host_that_is_killed_ends_the_group_and_leaves_nothing(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    port = free_port()
    host = Stages(tmp_path / "log", "--join", f"127.0.0.1:{port}", "--model", str(llama[0]))
    try:
        engine = load_remote(llama[0], port, stages_token="")
        ranks = host.ranks()
        assert ranks
        host.kill()
        engine.add(request("r", prompt(1, 20, 199)))
        with pytest.raises(RankLostError, match=r"rank 1 \(at .*\) is gone"):
            drain(engine)
        await eventually(lambda: not [rank for rank in ranks if rank.is_running()])
    finally:
        host.kill()
    with socket.create_server(("127.0.0.1", port)):
        """The port is free."""


def refusals(
    port: int, load_group: Callable[[], object], joining: dict[str, Any]
) -> tuple[str, str]:
    """Return the errors of a joining host and of the worker."""
    given = {"address": ("127.0.0.1", port), "token": TOKEN, "path": None, "max_stages": 1}
    host = StageHost(Joining(**given | joining))
    said: list[str] = []

    def run() -> None:
        try:
            host.run()
        except (StageRefusedError, ConfigError) as error:
            said.append(error.message)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with pytest.raises(ConfigError) as refused:
            load_group()
    finally:
        thread.join(10.0)
        host.stop()
        thread.join()
    assert said, "the host goes on"
    return said[0], str(refused.value)


def test_another_token_is_refused(llama: tuple[Path, Any]) -> None:
    port = free_port()
    of_host, of_worker = refusals(
        port, lambda: load_remote(llama[0], port, start_timeout_s=1.5), {"token": "other"}
    )
    assert "has another token. Give both sides the same" in of_host
    assert "no host came for stage 1 to 127.0.0.1" in of_worker
    assert "has another token" in of_worker


def test_another_checkpoint_is_refused(llama: tuple[Path, Any], tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", **SHAPE, vocab_size=203)
    port = free_port()
    said = refusals(port, lambda: load_remote(llama[0], port), {"path": tmp_path})
    for text in said:
        assert f"{tmp_path} is not the checkpoint of the worker, {llama[0]}" in text
        assert "Copy the worker's checkpoint here, and name it with --model" in text
    assert "stage 1 is refused by 127.0.0.1" in said[1]


def test_a_host_without_the_memory_refuses(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_stage, "available_bytes", lambda: 1000)
    port = free_port()
    for text in refusals(port, lambda: load_remote(llama[0], port), {}):
        assert "the KV cache of stage 1 (rank 1) takes" in text
        assert "Lower worker.engine.kv_cache_bytes" in text


def test_a_host_without_the_gpus_refuses(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host needs more GPUs the more stages it computes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device_stage, "_num_devices", lambda: 1)
    port = free_port()
    said = refusals(port, lambda: load_remote(llama[0], port, 2, device="cuda"), {})
    for text in said:
        assert "stage 1 (ranks 2 to 3) takes the GPUs of this host from number 0 to 1" in text
        assert "it has 1; where a host computes several stages, --max-stages times" in text


def test_a_stage_that_does_not_come_is_named(llama: tuple[Path, Any]) -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=r"no host came for stage 1 .* 0.2 s .*no host connected"):
        load_remote(llama[0], port, start_timeout_s=0.2)


def test_an_address_that_is_taken_is_waited_for_and_named(llama: tuple[Path, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=r"no host can join at 127.0.0.1.*in use"):
            load_remote(llama[0], port, start_timeout_s=0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"remote_stages": 2}, "remote_stages is 2, but must be from 0 to 1"),
        ({"remote_stages": -1}, "remote_stages is -1"),
        ({"stages_address": "0.0.0.0:7500", "stages_token": ""}, "Set engine.stages_token"),
        ({"stages_address": "7500"}, "engine.stages_address is '7500'; write host:port"),
        ({"disk_cache_path": "/tmp/kv"}, "disk_cache_path keeps whole blocks"),
        ({"pipeline_parallel": 1}, "remote_stages is 1, but must be from 0 to 0"),
    ],
    ids=str,
)
def test_unsupported_settings_of_remote_stages_are_refused(
    llama: tuple[Path, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_remote(llama[0], 1, **settings)


def test_a_host_that_is_stopped_while_it_waits_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host ends both without a worker and with a silent one."""
    monkeypatch.setattr(hosts, "_ANSWER_TIMEOUT_S", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for port in (free_port(), listener.getsockname()[1]):
            host = StageHost(Joining(("127.0.0.1", port), TOKEN, None, 2))
            thread = threading.Thread(target=host.run)
            thread.start()
            if port == listener.getsockname()[1]:
                others = [listener.accept()[0] for _ in range(2)]
            host.stop()
            thread.join(10.0)
            assert not thread.is_alive()
    for other in others:
        other.close()


async def test_a_host_that_came_is_kept_while_another_is_waited_for(
    llama: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The host is kept longer than ranks wait for one another, and is free again if no other host
    comes."""
    caplog.set_level("INFO")
    port = free_port()
    host = StageHost(Joining(("127.0.0.1", port), TOKEN, None, 1))
    thread = threading.Thread(target=host.run)
    thread.start()
    try:
        settings: dict[str, Any] = {"pipeline_parallel": 3, "remote_stages": 2}
        with pytest.raises(ConfigError, match=r"no host came for stage 2 .*no host connected"):
            load_remote(llama[0], port, **settings, rank_timeout_s=1.0, start_timeout_s=4.0)
        await eventually(lambda: not host._stages)
    finally:
        host.stop()
        thread.join()
    [ended] = [one.getMessage() for one in caplog.records if "group has ended" in one.msg]
    assert ended.endswith(" says: the group has ended")
