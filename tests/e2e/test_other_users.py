"""Protection of a system of ``millrace up`` from other users of the machine."""

from __future__ import annotations

import ipaddress
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import clickhouse_connect
import psutil
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from millrace.bus import subjects
from millrace.cli.local.private_files import Credentials
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

# Tries to read each file, and says hello to each server without a password: prints what it got.
# Of the whole machine; a test's own is among the run's folders.
_TEMPORARY = Path(tempfile.gettempdir())
_STRANGER = r"""
import json, socket, sys, urllib.error, urllib.request
files, nats, redis, store = json.loads(sys.argv[1])
read = []
for name in files:
    try:
        with open(name, "rb") as file:
            file.read(1)
        read.append(name)
    except PermissionError:
        pass
def talk(port, *lines):
    with socket.create_connection(("127.0.0.1", port), 5) as link:
        link.settimeout(5)
        heard = link.recv(65536) if port == nats else b""
        for line in lines:
            link.sendall(line)
            heard += link.recv(65536)
    return heard.decode(errors="replace")
said = {
    "nats": talk(nats, b'CONNECT {"verbose":true}\r\n'),
    "redis": talk(redis, b"KEYS *\r\n"),
}
try:
    urllib.request.urlopen(f"http://127.0.0.1:{store}/?query=SELECT+1", timeout=5)
    said["clickhouse"] = "answered"
except urllib.error.HTTPError as error:
    said["clickhouse"] = f"{error.code} {error.read().decode()}"
print(json.dumps({"read": read, "said": said}))
"""


def secrets_of(system: System) -> list[str]:
    held = json.loads((system.data / "credentials.json").read_text())
    assert set(held) == set(Credentials.__struct_fields__)
    assert all(len(secret) == 48 for secret in held.values())
    return list(held.values())


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def is_open_to_others(path: Path) -> bool:
    """False for a file that was removed meanwhile, as stores do when they merge."""
    try:
        return bool(path.stat().st_mode & 0o077)
    except FileNotFoundError:
        return False


def as_nobody() -> None:
    """Run as a user without files, where that is possible."""
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)


def test_folders_and_files_are_closed_to_others(system: System) -> None:
    for name in ("run", "logs", "nats", "redis", "clickhouse"):
        folder = system.data / name
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, name
    shared = [
        path
        for name in ("run", "logs", "nats", "redis", "clickhouse")
        for path in files_of(system.data / name)
        if is_open_to_others(path)
    ]
    assert shared == []
    for name in ("credentials.json", "run/nats.url", "run/clickhouse.url", "run/endpoints.json"):
        assert stat.S_IMODE((system.data / name).stat().st_mode) == 0o600, name


def test_no_password_is_on_a_command_line_in_an_environment_or_in_a_log(system: System) -> None:
    secrets = secrets_of(system)
    for process in system.processes():
        with process.oneshot():
            try:
                seen = " ".join([*process.cmdline(), *process.environ().values()])
            except psutil.NoSuchProcess:
                continue
        assert not [secret for secret in secrets if secret in seen], process.cmdline()
    logs = [*files_of(system.data / "logs"), system.data / "up.log"]
    assert len(logs) > 5
    for log in logs:
        text = log.read_text(errors="replace")
        assert not [secret for secret in secrets if secret in text], log


def test_servers_listen_on_loopback_only(system: System) -> None:
    heard_at: dict[str, set[str]] = {}
    for process in system.processes():
        try:
            name, connections = process.name(), process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                heard_at.setdefault(connection.laddr.ip, set()).add(name)
    assert len(heard_at) >= 1
    assert {"nats-server", "redis-server"} <= set().union(*heard_at.values())
    assert [ip for ip in heard_at if not ipaddress.ip_address(ip).is_loopback] == []


@pytest.fixture
def way_in(system: System) -> Iterator[Path]:
    """Write a file that everybody may read beside the system's, in folders open to everybody.

    Only the system's own permissions keep other users out.
    """
    usual = {
        folder: stat.S_IMODE(folder.stat().st_mode)
        for folder in (system.data, *system.data.parents)
        if folder.is_relative_to(_TEMPORARY) and folder != _TEMPORARY
    }
    public = system.data / "public.txt"
    public.write_text("for all\n")
    public.chmod(0o644)
    for folder in usual:
        folder.chmod(0o755)
    yield public
    for folder, mode in usual.items():
        folder.chmod(mode)
    public.unlink()


def test_another_user_reads_no_file_and_connects_to_no_server(system: System, way_in: Path) -> None:
    """A child without root's rights is refused; a child of root may do all of this."""
    ports = [urlsplit(system.endpoints[name]).port for name in ("nats", "redis", "clickhouse")]
    files = [str(way_in), str(system.data / "credentials.json")]
    files += [
        str(path) for name in ("run", "nats", "redis") for path in files_of(system.data / name)
    ]
    ended = subprocess.run(
        ["/usr/bin/env", "python3", "-c", _STRANGER, json.dumps([files, *ports])],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
        cwd="/",
        preexec_fn=as_nobody,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    if os.getuid() == 0:
        assert found["read"] == [str(way_in)]
    assert "Authorization Violation" in found["said"]["nats"]
    assert found["said"]["redis"].startswith("-NOAUTH")
    assert found["said"]["clickhouse"].startswith("401 Code: 516")


def test_a_user_who_may_read_the_files_connects(system: System) -> None:
    """Clients that know no command of ours: by the addresses that are written down for them."""
    url = (system.data / "run" / "clickhouse.url").read_text().strip()
    client = clickhouse_connect.get_client(dsn=url, database="millrace")
    assert client.query("SELECT 1").result_rows == [(1,)]
    client.close()
    redis = urlsplit(system.endpoints["redis"])
    with socket.create_connection((redis.hostname or "", redis.port or 0), 5.0) as link:
        link.sendall(f"AUTH {redis.password}\r\n".encode())
        assert link.recv(100) == b"+OK\r\n"


async def test_the_stand_in_for_kafka_has_no_passwords(system: System) -> None:
    """The missing passwords are a limitation, which the command states."""
    client = AIOKafkaAdminClient(bootstrap_servers=system.endpoints["kafka"])
    await client.start()
    assert subjects.REQUESTS_TOPIC in await client.list_topics()
    await client.close()


async def test_a_loss_of_nats_is_logged_without_its_password(system: System) -> None:
    """The line is there, and the address in it has no password."""
    system.kill("nats")
    log = system.data / "logs" / "scheduler-1.log"
    await eventually(
        lambda: "the NATS server is reachable again" in log.read_text(), timeout_s=60.0
    )
    lines = [line for line in log.read_text().splitlines() if "the NATS server is" in line]
    assert any("***@127.0.0.1" in line for line in lines)
    secrets = secrets_of(system)
    assert not [secret for secret in secrets for line in lines if secret in line]
    published = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "cli",
                "publish",
                "--model",
                "demo",
                "--prompt",
                "What is TTFT?",
            ),
            *("--stream", "--data", str(system.data)),
        ],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert published.returncode == 0, published.stderr
