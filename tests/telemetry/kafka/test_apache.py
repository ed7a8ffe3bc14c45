"""Apache Kafka is found, fetched and configured, without starting it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from millrace.runtime.binaries import MissingBinaryError
from millrace.schemas.errors import ConfigError
from millrace.telemetry.kafka.apache import jars, java
from millrace.telemetry.kafka.apache.broker import ApacheBroker, KafkaFormatError, KafkaProgram
from millrace.telemetry.kafka.apache.jars import KafkaFetchError, fetch_jars
from millrace.telemetry.kafka.apache.java import find_java
from tests.support.servers import free_port

_FILES = {"a/one/1/one-1.jar": b"one", "b/two/2/two-2.jar": b"two" * 1000}


def program(folder: Path, script: str, name: str = "java") -> Path:
    """A program that a shell runs."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def java_of(folder: Path, version: str) -> Path:
    return program(folder, f"""echo 'openjdk version "{version}" 2025-04-15' >&2""")


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "packaged_programs", lambda *_: [])


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.2", "26-ea"])
def test_the_java_of_the_path_serves_from_version_17(version: str, tmp_path: Path) -> None:
    mine = java_of(tmp_path, version)
    assert find_java({"PATH": f"{tmp_path}:{os.environ['PATH']}"}) == mine


@pytest.mark.usefixtures("no_package")
def test_java_home_goes_before_the_path(tmp_path: Path) -> None:
    home = java_of(tmp_path / "home" / "bin", "21.0.1")
    java_of(tmp_path / "path", "17.0.1")
    path = f"{tmp_path / 'path'}:{os.environ['PATH']}"
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": path}) == home


def test_the_package_serves_where_the_others_are_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = java_of(tmp_path / "package", "25.0.2")
    java_of(tmp_path / "path", "11.0.2")
    java_of(tmp_path / "home" / "bin", "1.8.0_392")
    monkeypatch.setattr(java, "packaged_programs", lambda package, name: [packaged])
    environment = {"JAVA_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path / 'path'}:/bin"}
    assert find_java(environment) == packaged


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("""echo 'java version "1.8.0_392"' >&2""", "is version 8"),
        ("""echo 'openjdk version "11.0.2"' >&2""", "is version 11"),
        ("exit 1", "is broken"),
        (None, "this machine has none. Install"),
    ],
)
def test_without_a_java_the_error_says_what_to_install(
    script: str | None, message: str, tmp_path: Path
) -> None:
    if script is not None:
        program(tmp_path, script)
    with pytest.raises(MissingBinaryError) as caught:
        find_java({"PATH": str(tmp_path)})
    assert message in caught.value.message
    for remedy in ("millrace[kafka]", "openjdk-17-jre-headless", "JAVA_HOME", "--kafka embedded"):
        assert remedy in caught.value.message


class _Repository(SimpleHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Maven repository with two files, which are all that a broker needs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_Repository, "asked", [], raising=False)
    lines = []
    for path, content in _FILES.items():
        file = tmp_path / "maven2" / path
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {path}\n")
    lock = tmp_path / "jars.sha256"
    lock.write_text("".join(lines))
    monkeypatch.setattr(jars, "_LOCK_FILE", lock)
    handler = partial(_Repository, directory=str(tmp_path / "maven2"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_the_jars_are_fetched_once(repository: str) -> None:
    messages: list[str] = []
    folder = await fetch_jars(f"{repository}/", messages.append)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "one-1.jar": b"one",
        "two-2.jar": b"two" * 1000,
    }
    assert len(messages) == 1
    assert str(folder) in messages[0]
    assert sorted(_Repository.asked) == sorted(f"/{path}" for path in _FILES)
    assert await fetch_jars(repository, messages.append) == folder
    assert len(messages) == 1
    assert len(_Repository.asked) == 2


async def test_a_damaged_or_missing_jar_is_fetched_again(repository: str) -> None:
    folder = await fetch_jars(repository, lambda _: None)
    (folder / "one-1.jar").write_bytes(b"on")
    _Repository.asked.clear()
    await fetch_jars(repository, lambda _: None)
    assert _Repository.asked == ["/a/one/1/one-1.jar"]
    assert (folder / "one-1.jar").read_bytes() == b"one"


async def test_processes_that_fetch_at_once_do_not_disturb_one_another(repository: str) -> None:
    folders = await asyncio.gather(*(fetch_jars(repository, lambda _: None) for _ in range(4)))
    assert len({*folders}) == 1
    assert sorted(file.name for file in folders[0].iterdir()) == ["one-1.jar", "two-2.jar"]


async def test_a_file_with_another_checksum_is_refused(repository: str, tmp_path: Path) -> None:
    (tmp_path / "maven2" / "a/one/1/one-1.jar").write_bytes(b"evil")
    with pytest.raises(KafkaFetchError, match=r"one-1\.jar is not the file .* kafka\.maven_url"):
        await fetch_jars(repository, lambda _: None)
    assert not (jars.jars_folder() / "one-1.jar").exists()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:{closed_port}", "Cannot connect to host"),
        ("{repository}/elsewhere", "it answered 404"),
        ("http://user:secret@127.0.0.1:9/maven2", "Cannot connect to host"),
        ("http://", "http:"),
    ],
)
async def test_a_repository_that_cannot_be_reached_is_an_error_with_remedies(
    url: str, why: str, repository: str
) -> None:
    with pytest.raises(KafkaFetchError) as caught:
        await fetch_jars(url.format(repository=repository, closed_port=free_port()), lambda _: None)
    assert why in caught.value.message
    assert "secret" not in caught.value.message
    for remedy in ("HTTPS_PROXY", "kafka.maven_url", "copy that folder", "--kafka embedded"):
        assert remedy in caught.value.message


def test_the_locked_jars_are_one_version_of_kafka() -> None:
    locked = jars.jars()
    assert len({jar.name for jar in locked}) == len(locked) > 40
    kafka = [jar for jar in locked if jar.path.startswith("org/apache/kafka/")]
    assert {jar.path.split("/")[-2] for jar in kafka} == {jars.VERSION}
    assert all(len(jar.sha256) == 64 for jar in locked)


def settings_of(broker: ApacheBroker) -> dict[str, str]:
    lines = (broker.folder / "server.properties").read_text(encoding="ascii").splitlines()
    return dict(line.split("=", maxsplit=1) for line in lines)


@pytest.fixture
def formats(tmp_path: Path) -> KafkaProgram:
    """A Java that formats a folder, and notes how often."""
    data = tmp_path / "dätä \\ x" / "kafka" / "data"
    script = f"""mkdir -p '{data}'; touch '{data}/meta.properties'; echo "$*" >> '{tmp_path}/ran'"""
    return KafkaProgram(program(tmp_path / "bin", script), tmp_path)


def broker_in(folder: Path, program: KafkaProgram) -> ApacheBroker:
    return ApacheBroker(program, folder, port=19092, controller_port=19093)


def test_a_folder_is_formatted_once(formats: KafkaProgram, tmp_path: Path) -> None:
    broker = broker_in(tmp_path / "dätä \\ x" / "kafka", formats)
    broker.prepare()
    broker.prepare()
    [ran] = (tmp_path / "ran").read_text().splitlines()
    assert "kafka.tools.StorageTool format --cluster-id=" in ran


def test_the_broker_is_bounded_and_on_loopback(formats: KafkaProgram, tmp_path: Path) -> None:
    broker = broker_in(tmp_path / "dätä \\ x" / "kafka", formats)
    broker.prepare()
    settings = settings_of(broker)
    listeners = "PLAINTEXT://127.0.0.1:19092,CONTROLLER://127.0.0.1:19093"
    assert settings["listeners"] == listeners
    assert settings["advertised.listeners"] == "PLAINTEXT://127.0.0.1:19092"
    assert settings["log.retention.hours"] == "168"
    assert settings["log.retention.bytes"] == str(2**30)
    # Java reads a backslash as an escape, and bytes as Latin-1.
    folder = str(tmp_path / "d\\u00e4t\\u00e4 \\\\ x" / "kafka" / "data")
    assert settings["log.dirs"] == folder
    assert {"-Xmx256m", "-XX:+ExitOnOutOfMemoryError"} <= set(broker.command())


def test_a_folder_that_kafka_cannot_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a comma, or use --kafka embedded"):
        broker_in(tmp_path / "a,b", KafkaProgram(tmp_path, tmp_path))
    script = "echo 'Log directory is broken.' >&2; printf '\\tat kafka.Kafka\\n' >&2; exit 1"
    broken = KafkaProgram(program(tmp_path / "bin", script), tmp_path)
    with pytest.raises(KafkaFormatError, match=r"/data \(Log directory is broken\.\)\. Move"):
        broker_in(tmp_path / "kafka", broken).prepare()


async def test_a_port_without_a_broker_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        broker = ApacheBroker(KafkaProgram(tmp_path, tmp_path), tmp_path, port, controller_port=1)
        threading.Thread(target=lambda: silent.accept()[0].close(), daemon=True).start()
        assert not await broker.answers()
    assert not await broker.answers()
