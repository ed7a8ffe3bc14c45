"""The fixture of warm processes. Test files import it, so that only they count as affected by what
the processes run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.engine.warm_processes import Server, WarmProcess


@cache
def _server() -> Server:
    """Return the one server of this process's tests; it ends when our end of its socket closes."""
    return Server()


@pytest.fixture(scope="module")
def warm_processes() -> Iterator[None]:
    """Ranks and engines that the tests of a module start have imported torch already."""
    WarmProcess.server = _server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", WarmProcess)
        yield
