"""``millrace adapters`` on a real redis-server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from millrace.cli.main import main
from millrace.registry.checkpoints.checkpoint import read_model_config
from tests.support.adapters import write_adapter
from tests.support.servers import RedisServer


class Adapters:
    """The command, with a catalogue of ``models`` models."""

    def __init__(self, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._redis_url = redis_url
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["adapters", *arguments, "--redis", self._redis_url])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def adapters(
    redis_server: RedisServer, capsys: pytest.CaptureFixture[str], catalogue: Path
) -> Adapters:
    del catalogue
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return Adapters(redis_server.url, capsys)


@pytest.fixture
def catalogue(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n  tiny:\n    source: {checkpoint}\n")
    monkeypatch.setenv("MILLRACE_CATALOGUE", str(file))
    return file


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    return write_adapter(tmp_path / "sql", read_model_config(checkpoint), rank=3)


def test_a_life_of_an_adapter(adapters: Adapters, folder: Path) -> None:
    assert "no adapters" in adapters.run("list")[1]
    code, out, _ = adapters.run("add", "sql", str(folder), "--tenant", "acme")
    assert (code, out) == (0, "sql is offered, of rank 3, as sql or tiny:sql\n")
    _, out, _ = adapters.run("list")
    assert "acme" in out
    assert "tiny" in out
    (shown,) = json.loads(adapters.run("list", "--json")[1])
    assert (shown["name"], shown["model"], shown["tenants"]) == ("sql", "tiny", ["acme"])
    code, _, err = adapters.run("add", "sql", str(folder))
    assert code == 2
    assert "is taken" in err
    assert adapters.run("add", "sql", str(folder), "--replace")[0] == 0
    assert "no longer offered" in adapters.run("remove", "sql")[1]
    code, _, err = adapters.run("remove", "sql")
    assert code == 2
    assert "no adapter 'sql'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sql", "nowhere/at/all"), "cannot be found"),
        (("a b", "{folder}"), "An adapter's name must be"),
        (("auto", "{folder}"), "The adapter name auto is reserved"),
        (("..", "{folder}"), "The adapter name .. is reserved"),
        (("tiny", "{folder}"), "is taken"),
        (("sql", "{folder}", "--model", "other"), "no model 'other'"),
        (("sql", "{folder}/.."), "adapter_config.json cannot be read"),
    ],
)
def test_what_cannot_be_offered(
    adapters: Adapters, folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = adapters.run("add", *(one.format(folder=folder) for one in arguments))
    assert code == 2
    assert message in err


def test_of_several_models_one_is_to_be_named(
    adapters: Adapters, folder: Path, catalogue: Path, checkpoint: Path
) -> None:
    catalogue.write_text(f"models: {{a: {{source: {checkpoint}}}, b: {{source: {checkpoint}}}}}")
    code, _, err = adapters.run("add", "sql", str(folder))
    assert code == 2
    assert "There are several models; name the adapter's: a, b." in err
    assert adapters.run("add", "sql", str(folder), "--model", "b")[0] == 0
