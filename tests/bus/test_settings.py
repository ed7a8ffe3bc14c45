"""Configuration: every mistake is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.settings import load_config
from schemas.config import Config
from schemas.errors import ConfigError


def test_defaults() -> None:
    assert load_config(None, {"HOME": "/", "PATH": ""}) == Config()


def test_a_file_and_variables_above_it(tmp_path: Path) -> None:
    toml = tmp_path / "millrace.toml"
    toml.write_text('log_level = "debug"\n[nats]\nurl = "nats://a"\nack_wait_s = 3\n')
    env = {
        "MILLRACE_NATS__URL": "nats://b",
        "MILLRACE_WORKER__ENGINE__MAX_NUM_SEQUENCES": "7",
        "MILLRACE_SCHEDULER__MODELS": "demo, other",
        "MILLRACE_WORKER__FLUSH_INTERVAL_MS": "2.5",
    }
    config = load_config(str(toml), env)
    assert config.log_level == "debug"
    assert config.nats.url == "nats://b"
    assert config.nats.ack_wait_s == 3.0
    assert config.worker.engine.max_num_sequences == 7
    assert config.worker.flush_interval_ms == 2.5
    assert config.scheduler.models == ("demo", "other")


def test_yaml_and_the_file_variable(tmp_path: Path) -> None:
    yaml = tmp_path / "millrace.yaml"
    yaml.write_text("gateway:\n  port: 9000\nscheduler:\n  models: [demo]\n")
    config = load_config(None, {"MILLRACE_CONFIG": str(yaml)})
    assert config.gateway.port == 9000
    assert config.scheduler.models == ("demo",)
    (tmp_path / "empty.yml").write_text("")
    assert load_config(str(tmp_path / "empty.yml"), {}) == Config()


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("MILLRACE_NATS__ULR", "x", "ulr"),
        ("MILLRACE_NAST__URL", "x", "nast"),
        ("MILLRACE_NATS", "x", "nats is a section"),
        ("MILLRACE_LOG_LEVEL__X", "x", "log_level has nothing below it"),
        ("MILLRACE_GATEWAY__PORT", "many", "MILLRACE_GATEWAY__PORT"),
        ("MILLRACE_NATS__ACK_WAIT_S", "-1", "nats.ack_wait_s"),
        ("MILLRACE_NATS__ACK_WAIT_S", "inf", "nats.ack_wait_s"),
    ],
)
def test_bad_variables(name: str, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {name: text})
    assert named in refused.value.message


@pytest.mark.parametrize(
    ("file_name", "text", "named"),
    [
        ("a.toml", "[nats]\nulr = 1\n", "ulr"),
        ("a.toml", '[gateway]\nport = "x"\n', "gateway.port"),
        ("a.toml", "nats", "a.toml"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.yaml", "- 1\n", "table"),
        ("a.json", "{}", ".toml, .yaml"),
    ],
)
def test_bad_files(tmp_path: Path, file_name: str, text: str, named: str) -> None:
    path = tmp_path / file_name
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(str(path), {})
    assert named in refused.value.message


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(str(tmp_path / "none.toml"), {})
