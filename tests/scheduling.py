"""Which tests share a process when several run them, and which begin first.

A file's tests stay together, since its fixtures are made once for each process. Tests of whole
systems stay together too: they share one system, and two of them at a time would be too many for a
small machine. Where each test of a file is long and needs nothing of the others, each goes alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_SYSTEMS = "tests/e2e/"
# About how many seconds of an otherwise idle machine each long room takes. What is not here takes
# less than the least of them.
LONG_ROOMS_S = {
    "tests/gateway/api/test_fuzz_http.py": 65,
    "tests/benchmarks/test_gpu_smoke.py": 65,
    "tests/workers/kernels/gpu/test_compile.py": 60,
    "tests/benchmarks/test_scheduler_benchmarks.py": 55,
    "tests/workers/engine/group/test_group.py": 50,
    "tests/workers/engine/beams/test_beam_search.py": 45,
    "tests/benchmarks/test_chaos.py": 38,
    "tests/workers/process/test_worker_process.py": 38,
    "tests/telemetry/sink/test_crashes.py": 36,
    "tests/benchmarks/test_telemetry_benchmarks.py": 35,
    "tests/telemetry/sink/test_apache_kafka.py": 33,
    "tests/telemetry/queries/test_queries.py": 30,
    "tests/workers/engine/device_group/test_device_group_failures.py": 30,
    "tests/workers/kernels/gpu/test_sampling.py": 30,
    "tests/telemetry/test_ops_panels.py": 28,
    "tests/registry/demo/test_model.py": 28,
    "tests/workers/engine/device_group/test_device_group.py": 28,
    "tests/telemetry/test_ops_page_views.py": 27,
    "tests/workers/engine/group/remote/test_stages.py": 27,
    "tests/workers/process/test_peers.py": 25,
    "tests/workers/engine/speculation/test_head_draft.py": 22,
    "tests/telemetry/test_ops_page.py": 22,
    "tests/workers/engine/eager/test_products.py": 20,
    "tests/telemetry/test_parts.py": 20,
    "tests/tracing/test_system.py": 20,
    "tests/cli/simulate/test_simulate.py": 20,
    "tests/workers/adapters/test_against_peft.py": 18,
    "tests/benchmarks/test_soak.py": 18,
    "tests/deploy/test_wheel.py": 18,
    "tests/workers/engine/test_classifiers.py": 16,
    "tests/telemetry/sink/test_store_full.py": 16,
    "tests/workers/engine/device/test_device_models.py": 15,
    "tests/workers/engine/kv/test_peers.py": 15,
    "tests/workers/engine/device/test_device_placement.py": 15,
    "tests/workers/engine/eager/test_fused_decoder.py": 14,
    "tests/telemetry/store/test_older_stores.py": 14,
    "tests/cli/simulate/test_simulate_tiers.py": 14,
    "tests/workers/engine/grammar/test_grammar.py": 13,
    "tests/cli/simulate/test_simulate_roles.py": 13,
    "tests/workers/engine/test_sequence_group.py": 13,
    "tests/workers/kernels/test_products.py": 12,
    "tests/workers/engine/speculation/test_equality.py": 12,
    "tests/workers/models/test_random_checkpoints.py": 10,
    "tests/telemetry/sink/test_kafka_security.py": 10,
    "tests/benchmarks/test_analytics.py": 10,
    "tests/gateway/api/test_browser_client.py": 10,
    "tests/gateway/test_chat_page_killed.py": 10,
    "tests/tracing/test_otlp.py": 10,
}
_ALONE = ("tests/workers/models/test_random_checkpoints.py",)


def room_of(node_id: str) -> str:
    """What names the tests that one process runs one after the other."""
    if node_id.startswith(_SYSTEMS):
        return _SYSTEMS
    if node_id.startswith(_ALONE):
        return node_id
    return node_id.split("::", 1)[0]


def refuse_namesakes(items: list[pytest.Item]) -> None:
    """Of tests with one id, xdist would run one and not tell. Raises UsageError."""
    counts = Counter(item.nodeid for item in items)
    namesakes = sorted(name for name, count in counts.items() if count > 1)
    if namesakes:
        raise pytest.UsageError(f"Several tests have the same id: {', '.join(namesakes)}")


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Systems, which wait more than they compute, then the rooms that are known to be long, then
    others with slow tests, then large ones, so that no process is left with a long room when the
    others are done."""
    rooms: dict[str, list[pytest.Item]] = {}
    for item in items:
        rooms.setdefault(room_of(item.nodeid), []).append(item)

    def rank(name: str) -> tuple[bool, int, int, int]:
        num_slow = sum(item.get_closest_marker("slow") is not None for item in rooms[name])
        long_s = LONG_ROOMS_S.get(name.split("::", 1)[0], 0)
        return name != _SYSTEMS, -long_s, -num_slow, -len(rooms[name])

    return [item for name in sorted(rooms, key=rank) for item in rooms[name]]


class RoomScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out rooms in the order in which their tests were collected."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return room_of(nodeid)
