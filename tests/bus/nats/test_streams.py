"""Changes to an existing stream: permitted parts, and the properties that they change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.js import JetStreamManager
from nats.js.api import StreamConfig

from millrace.bus import subjects
from millrace.bus.nats import connect, topology
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig

_HOUR_S = 3_600.0
_DAY_S = 24 * _HOUR_S


@pytest.fixture
async def manager(nats_config: NatsConfig) -> AsyncIterator[JetStreamManager]:
    client = await nats.connect(nats_config.url)
    yield client.jsm()
    await client.close()


async def start(url: str, part: Part = Part.SCHEDULER, **settings: Any) -> None:
    """A part comes and goes."""
    bus = await connect(NatsConfig(url=url, **settings), "test", part=part)
    await bus.close()


async def config_of(manager: JetStreamManager, stream: str) -> StreamConfig:
    return (await manager.stream_info(stream)).config


async def test_a_default_never_shrinks_a_stream(
    nats_config: NatsConfig, manager: JetStreamManager
) -> None:
    url = nats_config.url
    await start(url, results_ttl_s=7 * _DAY_S, max_stored_jobs=5_000_000)
    await start(url)
    assert (await config_of(manager, "RESULTS")).max_age == 7 * _DAY_S
    assert (await config_of(manager, "JOBS")).max_msgs == 5_000_000
    await start(url, results_ttl_s=_HOUR_S, max_stored_jobs=300)
    assert (await config_of(manager, "RESULTS")).max_age == _HOUR_S
    assert (await config_of(manager, "JOBS")).max_msgs == 300
    await start(url)
    assert (await config_of(manager, "RESULTS")).max_age == _DAY_S, "a default may grow it"
    assert (await config_of(manager, "JOBS")).max_msgs == 4_000_000


async def test_what_an_operator_sets_on_the_server_stays(
    nats_config: NatsConfig, manager: JetStreamManager
) -> None:
    await start(nats_config.url)
    made = await config_of(manager, "DEAD")
    edited = made.evolve(max_bytes=1 << 30, max_age=90 * _DAY_S, description="ours", max_msgs=-1)
    await manager.update_stream(edited)
    for part in (Part.SCHEDULER, Part.WORKER):
        await start(nats_config.url, part, results_ttl_s=_HOUR_S)
        assert await config_of(manager, "DEAD") == edited


async def test_a_scheduler_brings_an_older_stream_up_to_date(
    nats_config: NatsConfig, manager: JetStreamManager
) -> None:
    await manager.add_stream(name="DEAD", subjects=["dead.>"], max_msgs=10, max_consumers=5)
    before = await config_of(manager, "DEAD")
    await start(nats_config.url, Part.WORKER)
    assert await config_of(manager, "DEAD") == before, "a worker changes nothing that is there"
    await start(nats_config.url)
    now = await config_of(manager, "DEAD")
    assert now.subjects == [subjects.ALL_DEAD]
    assert (now.max_msgs, now.allow_direct) == (topology.DEAD_MAX_MESSAGES, True)


async def test_a_duplicate_window_fits_into_what_is_kept(
    nats_config: NatsConfig, manager: JetStreamManager
) -> None:
    await start(nats_config.url)
    made = await config_of(manager, "RESULTS")
    await manager.update_stream(made.evolve(duplicate_window=2 * _HOUR_S))
    await start(nats_config.url, results_ttl_s=_HOUR_S)
    now = await config_of(manager, "RESULTS")
    assert (now.max_age, now.duplicate_window) == (_HOUR_S, _HOUR_S)


async def test_a_closed_queue_keeps_its_other_properties(
    nats_config: NatsConfig, manager: JetStreamManager
) -> None:
    await start(nats_config.url, max_stored_jobs=5_000_000)
    bus = await connect(nats_config, "gateway", part=Part.GATEWAY)
    await bus.storage.admit_jobs(admit=False)
    closed = await config_of(manager, "JOBS")
    assert (closed.max_msg_size, closed.max_msgs) == (1, 5_000_000)
    await bus.storage.admit_jobs(admit=True)
    opened = await config_of(manager, "JOBS")
    assert (opened.max_msg_size, opened.max_msgs) == (-1, 5_000_000)
    await bus.close()


@pytest.mark.parametrize(
    ("existing", "wanted", "default", "merged"),
    [
        (3, 1, 1, 3),
        (3, 2, 1, 2),
        (1, 3, 1, 3),
        (5, 5, 1, 5),
    ],
)
def test_replicas(existing: int, wanted: int, default: int, merged: int) -> None:
    rest = {"name": "S", "max_age": 0, "duplicate_window": 1}
    made = topology.updated(
        {**rest, "num_replicas": existing},
        {**rest, "num_replicas": wanted},
        {**rest, "num_replicas": default},
    )
    assert made["num_replicas"] == merged
