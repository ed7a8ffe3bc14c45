"""A served model without weights for the tests of the worker's bus side."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from millrace.registry.served import ServedModel
from tests.support.engine.warm_processes import WarmProcess, warm_server
from tests.workers.scripted import served_model


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session")
def _warm_server() -> Iterator[None]:
    with warm_server():
        yield


@pytest.fixture(scope="module")
def warm_processes(_warm_server: None) -> Iterator[None]:
    """Ranks and engines that the tests of a module start have imported torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", WarmProcess)
        yield
