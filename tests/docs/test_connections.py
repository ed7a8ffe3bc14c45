"""``docs/connections.md`` names every setting of connections, and no other."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
import yaml

from millrace.runtime.settings import load_config
from millrace.schemas.config import (
    ClickHouseConfig,
    Config,
    KafkaConfig,
    NatsConfig,
    RedisConfig,
)
from tests.support.repository import ROOT

TEXT = (ROOT / "docs" / "connections.md").read_text(encoding="utf-8")
_SETTING = re.compile(r"`((?:nats|redis|kafka|clickhouse|gateway)\.\w+)`")
# What of the sections is no matter of connecting.
_OTHERWISE = {
    "nats": "replicas ack_wait_s max_deliver max_stored_jobs results_ttl_s files_ttl_s "
    "outbox_max_age_s connect_timeout_s",
    "kafka": "partitions replication_factor group server maven_url",
    "clickhouse": "path database serve_host serve_port max_query_s max_query_memory_bytes "
    "max_queries_memory_bytes max_queries max_queries_per_user max_query_wait_s",
    "redis": "",
}


def test_each_setting_that_is_named_exists() -> None:
    named = set(_SETTING.findall(TEXT))
    assert len(named) > 30
    for setting in named:
        attrgetter(setting)(Config())


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("nats", NatsConfig),
        ("redis", RedisConfig),
        ("kafka", KafkaConfig),
        ("clickhouse", ClickHouseConfig),
    ],
)
def test_each_setting_of_a_connection_is_named(section: str, kind: type[msgspec.Struct]) -> None:
    fields = {field.name for field in msgspec.structs.fields(kind)}
    named = {name.partition(".")[2] for name in _SETTING.findall(TEXT) if name.startswith(section)}
    assert fields - named == set(_OTHERWISE[section].split())


def test_the_examples_are_configurations(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.+?)```", TEXT, re.DOTALL)
    assert len(examples) == 5
    secret = tmp_path / "secret"
    secret.write_text("a secret\n")
    for number, example in enumerate(examples):
        path = tmp_path / f"{number}.yaml"
        path.write_text(example)
        section = next(iter(yaml.safe_load(example)))
        env = {}
        if section in {"redis", "kafka"}:
            env[f"MILLRACE_{section.upper()}__PASSWORD_FILE"] = str(secret)
        loaded = getattr(load_config(str(path), env), section)
        assert loaded != getattr(Config(), section)
