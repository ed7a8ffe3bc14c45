"""Other programs find the servers of ``millrace up``, whichever way their libraries take it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from millrace.cli.endpoints import Endpoints
from millrace.cli.local.private_files import remove_access_files, write_access_files

ENDPOINTS = Endpoints(
    http="http://127.0.0.1:8000",
    nats="nats://millrace:abc@127.0.0.1:4222",
    redis="redis://:r@127.0.0.1:6379/0",
    kafka="127.0.0.1:9092",
    clickhouse="http://us%20er:p%40%27s%22%24%3A%2F@127.0.0.1:8123",
)


def variables(file: Path) -> dict[str, str]:
    """Return the variables of a shell after it has read the file."""
    script = 'set -a; . "$0"; env -0'
    done = subprocess.run(
        ["env", "-i", "/bin/sh", "-c", script, str(file)], capture_output=True, check=True
    )
    found = dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry)
    return {name: value for name, value in found.items() if name.endswith(("URL", "USER", "WORD"))}


def test_addresses_users_and_passwords_stand_apart_and_together(tmp_path: Path) -> None:
    write_access_files(tmp_path, ENDPOINTS)
    assert variables(tmp_path / "nats.env") == {
        "NATS_URL": "nats://127.0.0.1:4222",
        "NATS_USER": "millrace",
        "NATS_PASSWORD": "abc",
    }
    assert variables(tmp_path / "clickhouse.env") == {
        "CLICKHOUSE_URL": "http://127.0.0.1:8123",
        "CLICKHOUSE_USER": "us er",
        "CLICKHOUSE_PASSWORD": "p@'s\"$:/",
    }
    assert (tmp_path / "nats.url").read_text().strip() == ENDPOINTS.nats
    assert (tmp_path / "clickhouse.url").read_text().strip() == ENDPOINTS.clickhouse
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    remove_access_files(tmp_path)
    assert not list(tmp_path.iterdir())
