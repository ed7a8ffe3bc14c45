"""Report on the choice of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millrace.engine.threads.choice import configure_threads, explain_threads, usable_cores
from millrace.schemas.config import EngineConfig

_CORES = usable_cores()
_PLURAL = "core" if _CORES == 1 else "cores"
pytestmark = pytest.mark.usefixtures("_threads_restored")


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_threads", "shared", "asked", "said"),
    [
        (
            3,
            True,
            {},
            "3 threads, asleep while they wait, because engine.num_threads says so",
        ),
        (
            1,
            False,
            {"GOMP_SPINCOUNT": "0"},
            (
                "1 thread, waiting as OMP_WAIT_POLICY and GOMP_SPINCOUNT say, "
                "because engine.num_threads says so"
            ),
        ),
        (
            0,
            True,
            {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE"},
            (
                "5 threads, waiting as OMP_WAIT_POLICY and GOMP_SPINCOUNT say, "
                "because OMP_NUM_THREADS says so"
            ),
        ),
    ],
)
def test_the_reason_is_what_decided(
    num_threads: int, shared: bool, asked: dict[str, str], said: str
) -> None:
    config = EngineConfig(num_threads=num_threads)
    chosen = dict(asked)
    count = configure_threads(config, shared, chosen)
    assert explain_threads(count, config, shared, asked) == said


@pytest.mark.parametrize(("shared", "why"), [(True, "other processes"), (False, "nothing else")])
def test_without_a_wish_the_machine_decides(shared: bool, why: str) -> None:
    chosen: dict[str, str] = {}
    count = configure_threads(EngineConfig(), shared, chosen)
    said = explain_threads(count, EngineConfig(), shared, {})
    assert why in said
    assert f"{_CORES} {_PLURAL}" in said
