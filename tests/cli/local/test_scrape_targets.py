"""The file by which Prometheus finds the parts of a local system."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from millrace.cli.local.scrape_targets import ScrapeTargets, metrics_env
from millrace.runtime.settings import load_config
from millrace.schemas.config import MetricsConfig
from millrace.schemas.errors import ConfigError


def _read(targets: ScrapeTargets) -> dict[str, str]:
    """Addresses by name."""
    entries = json.loads(targets.file.read_text())
    for entry in entries:
        assert entry.keys() == {"targets", "labels"}
        assert entry["labels"].keys() == {"part", "name"}
    return {entry["labels"]["name"]: entry["targets"][0] for entry in entries}


@pytest.fixture
def targets(tmp_path: Path) -> ScrapeTargets:
    return ScrapeTargets(tmp_path / "targets.json", MetricsConfig(port=20_600))


def test_each_part_has_a_port_of_its_own(targets: ScrapeTargets) -> None:
    ports = [targets.add(name, "worker") for name in ("worker-1", "worker-2")]
    assert len(set(ports)) == 2
    assert _read(targets) == {
        "worker-1": f"127.0.0.1:{ports[0]}",
        "worker-2": f"127.0.0.1:{ports[1]}",
    }
    assert load_config(None, metrics_env(ports[0])).metrics.port == ports[0]


def test_a_worker_that_goes_leaves_and_finds_its_port_again(targets: ScrapeTargets) -> None:
    port = targets.add("worker-1", "worker")
    other = targets.add("worker-2", "worker")
    targets.remove("worker-1")
    targets.remove("nobody")
    assert _read(targets) == {"worker-2": f"127.0.0.1:{other}"}
    assert targets.add("worker-1", "worker") == port
    assert set(_read(targets)) == {"worker-1", "worker-2"}
    targets.close()
    assert not targets.file.exists()


def test_a_port_that_is_taken_is_left_to_who_has_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        targets = ScrapeTargets(tmp_path / "targets.json", MetricsConfig(port=port))
        assert targets.add("scheduler-1", "scheduler") > port


@pytest.mark.parametrize(("gateway", "least"), [(8000, 9464), (18_000, 19_464), (65_000, 9464)])
def test_ports_follow_that_of_the_gateway(gateway: int, least: int, tmp_path: Path) -> None:
    targets = ScrapeTargets(tmp_path / "targets.json", MetricsConfig(), gateway)
    assert least <= targets.add("worker-1", "worker") < least + 200


def test_a_host_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    targets = ScrapeTargets(tmp_path / "targets.json", MetricsConfig(host="192.0.2.1"))
    with pytest.raises(ConfigError, match="metrics of gateway-1"):
        targets.add("gateway-1", "gateway")
