"""Ranks on devices that end, hang or fail to load, and unsupported settings of their group."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from millrace.engine.parallel import loading
from millrace.engine.parallel.control import JoinDevices
from millrace.engine.parallel.rank import meet
from millrace.engine.parallel.ranks import RankLostError
from millrace.engine.step.engine import Engine
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.engine.checkpoints import save_model
from tests.engine.parallel.group_engines import MOE, SHAPE, load, runner_of
from tests.engine.support import drain, prompt, request, tokens_by_request
from tests.support.engine.warm_fixture import warm_processes as warm_processes
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_model(path, "Llama", **SHAPE)
    return path


RANKS, STAGES = {"ranks": 2}, {"ranks": 1, "pipeline_parallel": 2}
of_each_kind = pytest.mark.parametrize(
    "pair", [RANKS, STAGES], indirect=True, ids=["ranks", "stages"]
)


@pytest.fixture
def pair(request: pytest.FixtureRequest, llama: Path) -> Iterator[Engine]:
    """Yield a group of 2 ranks, or of the kind of the parameter, which one test may break."""
    kind: dict[str, Any] = getattr(request, "param", RANKS)
    engine = load(llama, rank_timeout_s=2.0, cuda_graphs=False, **kind)
    members = runner_of(engine)._lead.members
    yield engine
    for pid in members.pids:
        if psutil.pid_exists(pid):
            psutil.Process(pid).resume()
    members.close()


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@of_each_kind
def test_a_rank_that_is_killed_ends_the_engine(pair: Engine) -> None:
    [pid] = runner_of(pair).pids
    pair.add(request("r", prompt(1, 20), max_tokens=200))
    pair.step()
    psutil.Process(pid).kill()
    with pytest.raises(RankLostError, match=rf"rank 1 \(process {pid}\) ended with exit code -9"):
        drain(pair)
    assert not _runs(pid)
    pair.add(request("later", prompt(1, 20)))
    with pytest.raises(RankLostError, match="exit code -9"):
        drain(pair)


async def test_a_rank_that_is_killed_at_rest_is_noticed_at_once(pair: Engine) -> None:
    [pid] = runner_of(pair).pids
    pair.rest()
    psutil.Process(pid).kill()
    await eventually(lambda: bool(runner_of(pair)._lead._why))
    with pytest.raises(RankLostError, match="exit code -9"):
        pair.rest()


@of_each_kind
def test_a_rank_that_hangs_is_given_up(pair: Engine) -> None:
    [pid] = runner_of(pair).pids
    psutil.Process(pid).send_signal(signal.SIGSTOP)
    pair.add(request("r", prompt(1, 20)))
    with pytest.raises(RankLostError, match=r"Timed out waiting|did not come to an exchange"):
        drain(pair)


async def test_failure_on_rank_0_ends_the_group(
    pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes after the other ranks received the step, while they wait in the middle of
    it."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    runner = runner_of(pair)
    [pid] = runner.pids
    with monkeypatch.context() as patch:
        patch.setattr(runner._state, "row_of", fail)
        pair.add(request("r", prompt(1, 20)))
        [output] = drain(pair)
        assert output.error is not None, "rank 1 had not heard of it"
    pair.add(request("again", prompt(1, 20), max_tokens=4))
    assert len(tokens_by_request(drain(pair))["again"]) == 4
    monkeypatch.setattr(runner._decoder, "forward", fail)
    pair.add(request("r", prompt(1, 20)))
    with pytest.raises(RankLostError, match="out of memory"):
        drain(pair)
    await eventually(lambda: not _runs(pid))


def test_no_rank_outlives_its_engine(llama: Path) -> None:
    engine = load(llama, 2, cuda_graphs=False)
    [pid] = runner_of(engine).pids
    assert _runs(pid)
    del engine
    gc.collect()
    assert not _runs(pid)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 3}, "4 query heads do not divide by 3.* over 1, 2, 4"),
        ({"tensor_parallel": 17}, "A stage has at most 16 ranks"),
        ({"tensor_parallel": 0}, "at least 1 rank"),
        ({"pipeline_parallel": 3}, "engine.pipeline_parallel is 3, but each stage has a layer at"),
        ({"pipeline_parallel": 2, "speculation": "ngram"}, "so no tokens can be proposed"),
        ({"pipeline_parallel": 2, "speculation": "eagle3=/nowhere"}, "no tokens can be proposed"),
        ({"pipeline_parallel": 2, "remote_stages": 2}, "remote_stages is 2, but must be from 0"),
        ({"expert_parallel": True}, "has none: leave it out"),
        ({"collectives": "nccl"}, "'nccl'; choose auto, shared_memory, gloo"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s must be above 0"),
        ({"disk_cache_path": "./kv"}, "disk_cache_path keeps whole blocks"),
        ({"kv_cache_bytes": 1000, "num_blocks": 0}, "kv_cache_bytes is 1000, but one block"),
        ({"speculation": "draft=/nowhere"}, "drafts and heads compute on a CPU"),
    ],
    ids=str,
)
def test_unsupported_settings_of_a_group_of_devices_are_refused(
    llama: Path, settings: dict[str, Any], message: str
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(ConfigError, match=message):
        load(llama, settings.pop("tensor_parallel", 2), **settings)
    gc.collect()
    assert {child.pid for child in psutil.Process().children()} <= before


def test_each_rank_needs_a_gpu_of_its_own(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for device, first in (("auto", 0), ("cuda", 0), ("cuda:1", 1)):
        message = rf"is 4, and each rank has a GPU of its own, from number {first} on.* has 3"
        with pytest.raises(ConfigError, match=message):
            load(llama, 4, device=device, kernels="auto")
    for ranks, settings in ((2, {}), (4, {"remote_stages": 1})):
        with pytest.raises(ConfigError, match=r"the stages of this host is 4, and each .* has 3"):
            load(llama, ranks, device="cuda", kernels="auto", pipeline_parallel=2, **settings)
    with pytest.raises(ConfigError, match=r"engine\.kernels is 'torch', but ranks with a GPU each"):
        load(llama, 2, device="cuda", kernels="torch")


@pytest.mark.parametrize(
    ("first", "devices"),
    [("cpu", ["cpu"] * 2), ("cuda", ["cuda:0", "cuda:1"]), ("cuda:3", ["cuda:3", "cuda:4"])],
)
def test_ranks_have_the_devices_from_the_first_on(first: str, devices: list[str]) -> None:
    named = [str(loading._device_of_rank(rank, torch.device(first))) for rank in range(2)]
    assert named == devices


def test_ranks_are_as_many_as_hear_one(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_RANKS", 3)
    with pytest.raises(ConfigError, match=r"is 4\. A host has at most 3 ranks with a GPU"):
        load(llama, 2, pipeline_parallel=2)


def test_a_checkpoint_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """Rank 0 finds the same error as the other ranks, and names the checkpoint."""
    save_model(tmp_path, "Qwen3Moe", **MOE)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load(tmp_path, 2)


def test_a_rank_that_cannot_be_loaded_says_why(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 does not wait for the other rank in the middle of its own loading."""

    def elsewhere(path: str, rank: int, **rest: Any) -> JoinDevices:
        return JoinDevices(path="/nowhere" if rank else path, rank=rank, **rest)

    monkeypatch.setattr(loading, "JoinDevices", elsewhere)
    with pytest.raises(ConfigError, match=r"rank 1 of the group: .*/nowhere"):
        load(llama, 2)


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        ("millrace.engine.nowhere", {}, "ended with exit code 1 before it was loaded"),
        (None, {"start_timeout_s": 0.001}, "was not loaded within the 0.001 s"),
    ],
)
def test_a_rank_that_does_not_come_is_not_waited_for(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str | None,
    settings: dict[str, Any],
    message: str,
) -> None:
    if module is not None:
        monkeypatch.setattr("millrace.engine.parallel.members._MODULE", module)
    with pytest.raises(ConfigError, match=rf"rank 1 \(process \d+\) {message}"):
        load(llama, 2, **settings)


def test_a_rank_that_is_killed_while_it_loads_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children())

    def kill_and_meet(join: JoinDevices, listener: socket.socket | None) -> Any:
        ranks = meet(join, listener)
        for child in set(psutil.Process().children()) - before:
            child.kill()
        return ranks

    monkeypatch.setattr(loading, "meet", kill_and_meet)
    with pytest.raises(ConfigError, match=r"rank 1 \(process \d+\) ended with exit code -9 before"):
        load(llama, 2)
