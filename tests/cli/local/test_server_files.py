"""The configuration that nats-server is given."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from millrace.cli.local.private_files import nats_config
from millrace.runtime.binaries import nats_server_path


@pytest.mark.parametrize("name", ["data", "mit Leerzeichen", "dätä", 'a"b', "c\\d", "数据 🚂"])
def test_nats_reads_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "nats.conf"
    url = "nats://millrace:secret@127.0.0.1:4222"
    file.write_text(nats_config(url, tmp_path / name), encoding="utf-8")
    command = [str(nats_server_path()), "-t", "-c", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
