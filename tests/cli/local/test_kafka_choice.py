"""Choice of Kafka by ``millrace up``, and its messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.cli.endpoints import Endpoints
from millrace.cli.greeting import greeting
from millrace.cli.local.live import StartingModels
from millrace.cli.local.models import SavedModels
from millrace.cli.local.ports import PortPicker
from millrace.cli.local.records.kafka_servers import ApacheServer, StandIn, kafka_server
from millrace.cli.local.stack import Plan
from millrace.cli.local.store_recovery import with_folders
from millrace.cli.local.up import _plan
from millrace.cli.main import build_parser, main
from millrace.registry.catalogue import load_catalogue
from millrace.schemas.config import Config, KafkaConfig, StorageConfig
from millrace.schemas.errors import ConfigError
from millrace.telemetry.kafka.apache import jars, java
from millrace.telemetry.kafka.apache.broker import KafkaProgram
from millrace.telemetry.kafka.apache.jars import KafkaFetchError

_PROGRAM = KafkaProgram(Path("/usr/bin/java"), Path("/jars"))


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The repositories from which Kafka was to be fetched."""
    repositories: list[str] = []

    async def fetch(repository: str, say: object) -> Path:
        repositories.append(repository)
        return _PROGRAM.jars

    monkeypatch.setattr(java, "find_java", lambda: _PROGRAM.java)
    monkeypatch.setattr(jars, "fetch_jars", fetch)
    return repositories


def plan_of(data: Path, *arguments: str) -> Plan:
    (data / "run").mkdir(exist_ok=True)
    return _plan(build_parser().parse_args(["up", *arguments]), data)


def test_the_stand_in_needs_neither_java_nor_a_network(tmp_path: Path, fetched: list[str]) -> None:
    assert plan_of(tmp_path).kafka is None
    assert plan_of(tmp_path, "--kafka", "embedded").kafka is None
    assert fetched == []


def test_apache_is_chosen_by_the_option_a_file_or_a_variable(
    tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan_of(tmp_path, "--kafka", "apache").kafka == _PROGRAM
    settings = tmp_path / "settings.yaml"
    settings.write_text("kafka: {server: apache, maven_url: 'https://mirror.example/maven'}")
    assert plan_of(tmp_path, "--config", str(settings)).kafka == _PROGRAM
    assert fetched == [KafkaConfig().maven_url, "https://mirror.example/maven"]
    # The command line has the last word.
    assert plan_of(tmp_path, "--config", str(settings), "--kafka", "embedded").kafka is None
    monkeypatch.setenv("MILLRACE_KAFKA__SERVER", "apache")
    assert plan_of(tmp_path).kafka == _PROGRAM


@pytest.mark.parametrize("word", ["redpanda", "Apache", ""])
def test_another_word_is_refused(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--data", str(tmp_path), "--kafka", word])
    assert ended.value.code == 2
    assert f"--kafka: invalid choice: '{word}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("kafka: {server: redpanda}", "`$.kafka.server`; it is one of embedded, apache"),
        ("worker: {engine: {kind: vlm}}", "`$.worker.engine.kind`; it is one of real, simulated"),
        ("kafka: {maven_url: 'maven.example'}", "kafka.maven_url: 'maven.example' is not a URL"),
        ("kafka: {maven_url: 'https://me:a/b@mirror.example'}", "kafka.maven_url has '/'"),
    ],
)
def test_a_wrong_setting_is_named(
    settings: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.yaml").write_text(settings)
    config = str(tmp_path / "settings.yaml")
    assert main(["up", "--data", str(tmp_path), "--config", config]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_variable_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_KAFKA__SERVER", "apche")
    assert main(["up", "--data", str(tmp_path)]) == 2
    message = "MILLRACE_KAFKA__SERVER: Invalid enum value 'apche'; it is one of embedded, apache"
    assert message in capsys.readouterr().err


def test_nothing_starts_without_what_kafka_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java, "packaged_programs", lambda *_: [])
    assert main(["up", "--data", str(tmp_path), "--kafka", "apache"]) == 2
    assert "millrace up: Apache Kafka needs Java 17 or newer" in capsys.readouterr().err

    async def fetch(repository: str, say: object) -> Path:
        raise KafkaFetchError(f"nothing at {repository}")

    monkeypatch.setattr(java, "find_java", lambda: _PROGRAM.java)
    monkeypatch.setattr(jars, "fetch_jars", fetch)
    assert main(["up", "--data", str(tmp_path), "--kafka", "apache"]) == 2
    assert f"millrace up: nothing at {KafkaConfig().maven_url}" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("nats.*"))


def test_somebody_elses_access_does_not_count_for_our_server(tmp_path: Path) -> None:
    theirs = KafkaConfig(
        bootstrap_servers="kafka-1:9093",
        tls=True,
        sasl_mechanism="PLAIN",
        user="me",
        password="secret",
        replication_factor=3,
        partitions=6,
        group="mine",
    )
    ports = PortPicker()
    ours = kafka_server(tmp_path, _PROGRAM, ports)
    assert isinstance(ours, ApacheServer)
    assert ours.told(theirs) == KafkaConfig(
        bootstrap_servers=ours.address(), partitions=6, group="mine"
    )
    stand_in = kafka_server(tmp_path, None, ports)
    assert isinstance(stand_in, StandIn)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "kafka.bootstrap").write_text("127.0.0.1:4\n")
    assert stand_in.told(theirs) == KafkaConfig(
        bootstrap_servers="127.0.0.1:4", partitions=1, group="mine"
    )
    ports.close()


def test_a_data_folder_that_kafka_cannot_have_is_refused(tmp_path: Path) -> None:
    ports = PortPicker()
    with pytest.raises(ConfigError, match="comma"):
        kafka_server(tmp_path / "a,b", _PROGRAM, ports)
    ports.close()


def test_the_disk_of_apache_kafka_is_watched(tmp_path: Path) -> None:
    config = StorageConfig(min_free_bytes=1)
    assert with_folders(config, tmp_path, keeps_kafka=True).kafka_dir == str(tmp_path / "kafka")
    assert with_folders(config, tmp_path).kafka_dir == ""


@pytest.mark.parametrize(
    ("program", "messages"),
    [
        (None, ("a stand-in for Kafka at 127.0.0.1:9092", "--kafka apache", "librdkafka")),
        (_PROGRAM, (f"Apache Kafka {jars.VERSION} at 127.0.0.1:9092", "docs/kafka.md")),
    ],
)
def test_the_start_message_says_which_clients_may_come(
    program: KafkaProgram | None, messages: tuple[str, ...], tmp_path: Path
) -> None:
    endpoints = Endpoints(
        http="http://127.0.0.1:8000",
        nats="nats://127.0.0.1:4222",
        redis="redis://127.0.0.1:6379/0",
        kafka="127.0.0.1:9092",
        clickhouse="http://127.0.0.1:8123",
    )
    models = StartingModels(known=load_catalogue(""), entries={}, saved=SavedModels())
    plan = Plan(data=tmp_path, config=Config(), models=("demo",), serving=models, kafka=program)
    message = greeting(endpoints, plan)
    assert [word for word in messages if word not in message] == []
