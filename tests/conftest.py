"""Fixtures that every package's tests may use: real servers, each test on clean ones."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from playwright.async_api import Browser

from millrace.schemas.config import NatsConfig
from tests.runner.plugin import pytest_addoption as pytest_addoption
from tests.runner.plugin import pytest_configure as pytest_configure
from tests.runner.rerun import pytest_sessionfinish as pytest_sessionfinish
from tests.support.certificates import Authority
from tests.support.chromium import CHROMIUM, chromium
from tests.support.nats.streams import delete_streams
from tests.support.programs import is_there
from tests.support.servers import NatsServer, RedisServer

# The tests import, and start, our programs over and over: what Python compiled is kept for the next
# start, also where the environment says otherwise. It was half of the time that an import takes.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# `make test-gpu` sets it, for the tests that are marked so.
_ON_GPU = os.environ.get("TEST_GPU") == "1"
if not _ON_GPU:
    # Read when a kernel is defined: kernels for GPUs then run on the CPU, one program after the
    # other.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Read when torch first looks for a device: on a machine with a GPU the tests test the same.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# How long an example takes is a matter of what else the machine does.
settings.register_profile("millrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millrace")
# Importing the tests leaves little garbage, which is collected once, when all are there.
gc.disable()


@pytest.fixture(scope="session", autouse=True)
def _one_compute_thread() -> Iterator[None]:
    """Limit compute to one thread in this process and in its children. The other cores stay free
    for other processes, and the small models of tests take longer on several cores. torch is
    imported by now if any test of the run needs it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _interpreter_prepared_once() -> None:
    """Prepare Triton's interpreter once, if any test of the run has kernels for GPUs."""
    if "triton.runtime.interpreter" in sys.modules:
        from tests.support.interpreter import prepare_once

        prepare_once()


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep temporary files of killed processes in a folder of the run; pytest keeps three of
    these."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _trusted_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust an authority that signs nothing, unless a test names another. Each HTTP client of the
    tests would otherwise read all authorities of the machine when it is made, which takes 16 ms."""
    authority = Authority(tmp_path_factory.mktemp("authority"), "Signs nothing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority.certificate))
        yield


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Start a real nats-server with JetStream for the whole run. Tests that stop it start it
    again."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Launch Chromium for tests whose event loop has module scope."""
    async with chromium() as launched:
        yield launched


@pytest.fixture
async def nats_config(nats_server: NatsServer) -> NatsConfig:
    """Return the configuration of a bus on the real server, which holds no stream when the test
    starts."""
    await delete_streams(nats_server)
    return NatsConfig(url=nats_server.url)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Start a real redis-server for the whole run. Tests that stop it start it again."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that skips for lack of a program, if REQUIRE_ALL_TESTS is set. Tests marked
    ``network`` may skip: some machines do not allow network namespaces."""
    report = yield
    is_needed = os.environ.get("REQUIRE_ALL_TESTS") and "network" not in item.keywords
    if report.skipped and is_needed:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: {report.longrepr}"
    return report


# Left out unless asked for by name: what takes minutes in an environment that is not made for a run
# of all other tests, and what takes a GPU.
_LEFT_OUT = ("vllm", "gpu")
# What is lacking where it is not there, by the marker of the tests that need it.
_NEEDED = {
    "browser": (CHROMIUM is not None, "Chromium, or TEST_CHROMIUM set"),
    "gpu": (_ON_GPU, "a CUDA device: make test-gpu"),
    "llamacpp": (is_there("llama-server"), "llama-server: make engines"),
    "vllm": (is_there("vllm"), "vllm: make engines-vllm"),
}


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that no garbage collection has to scan them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker in _LEFT_OUT:
        if marker not in config.option.markexpr:
            left_out = [item for item in items if item.get_closest_marker(marker)]
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=left_out)
    for marker, (has_it, what) in _NEEDED.items():
        if not has_it:
            for item in items:
                if item.get_closest_marker(marker) is not None:
                    item.add_marker(pytest.mark.skip(reason=f"needs {what}"))
