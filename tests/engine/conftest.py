"""A small random Llama, saved once, and engines on it.

A module's ``RUNNERS`` says which its tests run on: the CPU's own one, "host", and "device", that of
GPUs, with plain torch for its kernels and recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.step.engine import Engine
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import save_llama

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return (checkpoint folder, the transformers model that is in it)."""
    path = tmp_path_factory.mktemp("llama")
    return path, save_llama(path)


_RUNNERS: dict[str, dict[str, Any]] = {
    "host": {},
    "device": {"kernels": "reference", "overlap": False},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make_engine" in metafunc.fixturenames:
        runners = getattr(metafunc.module, "RUNNERS", ("host",))
        metafunc.parametrize("make_engine", runners, indirect=True)


@pytest.fixture
def make_engine(llama: tuple[Path, Any], request: pytest.FixtureRequest) -> MakeEngine:
    runner = _RUNNERS[request.param]

    def make(**config: Any) -> Engine:
        settings: dict[str, Any] = {"num_blocks": 128, "device": "cpu"} | runner | config
        return Engine.load(llama[0], EngineConfig(**settings))

    return make
