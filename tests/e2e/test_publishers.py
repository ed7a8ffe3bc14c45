"""Services in other languages, each with its own library, on a nats-server with accounts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.clients.packages import installed, need, npm_packages
from tests.e2e.guarded_system import GuardedSystem, guarded_system
from tests.support.nats.users import ACME
from tests.support.repository import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SOURCES = ROOT / "tests" / "clients" / "publishers"
WITHIN_S = 60.0
# The first time a client is built.
INSTALLED_WITHIN_S = 900


def rust() -> list[str]:
    need("cargo")
    sources = [SOURCES / "rust" / name for name in ("Cargo.toml", "Cargo.lock", "src")]
    build = ("nice", "-n", "15", "cargo", "build", "--quiet", "--locked")
    folder = installed("async-nats", sources, build)
    return [str(folder / "target" / "debug" / "publisher")]


def node() -> list[str]:
    need("npm", "node")
    packages = ("@nats-io/transport-node@3.4.0", "@nats-io/jetstream@3.4.0")
    folder = npm_packages("nats-io", *packages)
    # A module finds packages beside itself only.
    program = folder / "publisher.mjs"
    program.write_bytes((SOURCES / "node" / "publisher.mjs").read_bytes())
    return ["node", str(program)]


def java() -> list[str]:
    need("mvn", "javac")
    sources = [SOURCES / "java" / name for name in ("pom.xml", "Publisher.java")]
    fetch = ("mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib")
    folder = installed("jnats", sources, fetch, ("javac", "-cp", "lib/*", "Publisher.java"))
    return ["java", "-cp", f"{folder}:{folder}/lib/*", "Publisher"]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuardedSystem]:
    async with guarded_system(tmp_path_factory.mktemp("guarded")) as made:
        yield made
        assert made.forbidden() == []


async def run(system: GuardedSystem, command: list[str]) -> dict[str, Any]:
    """Run a publisher and return its output. Address, user and password are separate variables."""
    environment = {
        "NATS_URL": system.nats.url,
        "NATS_USER": ACME.user,
        "NATS_PASSWORD": system.nats.passwords[ACME.user],
        "TENANT": ACME.tenant,
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-2_000:]
    printed: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
    return printed


@pytest.mark.slow(reason="builds and runs clients in Rust, JavaScript and Java")
@pytest.mark.timeout(INSTALLED_WITHIN_S)
@pytest.mark.parametrize("client", [rust, node, java])
async def test_a_publisher_reads_frames_and_results_and_cancels(
    system: GuardedSystem, client: Callable[[], list[str]]
) -> None:
    printed = await run(system, await asyncio.to_thread(client))
    assert printed["end"] == "done"
    assert printed["asked"] == printed["stored"]
    assert (printed["asked"]["status"], printed["asked"]["text"]) == ("done", printed["text"])
    assert printed["text"]
    assert printed["cancelled"] == "cancelled"
    assert printed["unknown"]["error"]["code"] == "result_not_found"
    assert printed["foreign"] is False
