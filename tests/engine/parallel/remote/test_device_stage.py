"""Devices of a stage's ranks at its host, and their meeting point with other ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.engine.parallel.control import JoinDevices, NetworkPlace
from millrace.engine.parallel.lead import link_shape
from millrace.engine.parallel.remote import stage as device_stage
from millrace.engine.parallel.remote.connection import RankConnection
from millrace.engine.parallel.remote.stage import DeviceStage
from millrace.schemas.errors import ConfigError
from tests.engine.support import resolved

ENGINE = resolved(tensor_parallel=2, pipeline_parallel=3, remote_stages=2)


@pytest.fixture
def connection() -> Iterator[RankConnection]:
    """Yield a connection to a worker with another address than its host."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        theirs = listener.accept()[0]
    made = RankConnection(ours, 30.0)
    with theirs:
        yield made
    made.close()


def stage(connection: RankConnection, device: str, slot: int) -> DeviceStage:
    """Return the last of three stages."""
    join = JoinDevices(
        path="/at/the/worker",
        config=ENGINE,
        rank=4,
        device=device,
        place=NetworkPlace("", 7501, ""),
        link_fd=-1,
        link_shape=link_shape(2),
    )
    return DeviceStage(join, Path("/here"), slot, connection)


@pytest.mark.parametrize(
    ("device", "slot", "devices"),
    [
        ("cuda", 0, ["cuda:0", "cuda:1"]),
        ("cuda", 1, ["cuda:2", "cuda:3"]),
        ("cpu", 1, ["cpu", "cpu"]),
    ],
)
def test_each_rank_has_a_device_of_the_slot(
    connection: RankConnection, device: str, slot: int, devices: list[str]
) -> None:
    joins = [stage(connection, device, slot).join_of(index) for index in range(2)]
    assert [join.device for join in joins] == devices
    assert [(join.rank, join.link_reader) for join in joins] == [(4, 0), (5, 1)]
    assert {join.path for join in joins} == {"/here"}
    # As this host sees both.
    assert {join.place for join in joins} == {NetworkPlace("127.0.0.1", 7501, "127.0.0.2")}


@pytest.mark.parametrize(("num_devices", "slot"), [(1, 0), (3, 1), (0, 0)])
def test_devices_that_are_not_there_are_named(
    connection: RankConnection, monkeypatch: pytest.MonkeyPatch, num_devices: int, slot: int
) -> None:
    monkeypatch.setattr(device_stage, "_num_devices", lambda: num_devices)
    message = rf"stage 2 takes .* from number {2 * slot} to {2 * slot + 1}, .* {num_devices};"
    with pytest.raises(ConfigError, match=message):
        stage(connection, "cuda", slot).check("stage 2")
    monkeypatch.setattr(device_stage, "_num_devices", lambda: 2 * slot + 2)
    stage(connection, "cuda", slot).check("stage 2")
    stage(connection, "cpu", slot).check("stage 2")
