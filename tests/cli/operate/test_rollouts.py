"""Commands for rollouts on a real redis-server, without a scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from millrace.cli.main import main
from tests.support.servers import RedisServer


class Models:
    """The command, with a catalogue of two versions of ``tiny`` and one of ``other``."""

    def __init__(self, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._redis_url = redis_url
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["models", *arguments, "--redis", self._redis_url])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def models(
    redis_server: RedisServer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Models:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    file = tmp_path / "models.yaml"
    names = ("tiny", "tiny@v2", "other")
    file.write_text("models:\n" + "".join(f"  {one}: {{source: {checkpoint}}}\n" for one in names))
    monkeypatch.setenv("MILLRACE_CATALOGUE", str(file))
    return Models(redis_server.url, capsys)


def test_a_life_of_a_rollout(models: Models) -> None:
    assert "no rollouts" in models.run("rollouts")[1]
    steps = ("--canary", "10", "--step", "20", "--interval", "5m", "--abort-if", "ttft_p95>1.5x")
    code, out, _ = models.run("promote", "tiny@v2", *steps, "--no-wait")
    assert (code, out) == (0, "waiting for a worker of tiny@v2 …\n")
    (shown,) = json.loads(models.run("rollouts", "--json")[1])
    assert shown["rollout"]["canary_percent"] == 10.0
    assert shown["rollout"]["abort_if"] == "ttft_p95>1.5x"
    _, out, _ = models.run("rollouts")
    assert "waiting" in out
    assert "tiny@v2" in out
    code, _, err = models.run("promote", "tiny@v2", "--no-wait")
    assert (code, err.count("\n")) == (2, 1)
    assert "A rollout of tiny to tiny@v2 goes on" in err
    assert "answers requests for tiny" in models.run("retire", "tiny")[2]
    assert "answers requests for tiny" in models.run("retire", "tiny@v2")[2]
    code, out, _ = models.run("rollback", "tiny")
    assert (code, out) == (0, "aborted (by hand): tiny answers for tiny\n")
    assert "nothing to turn back to" in models.run("rollback", "tiny")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("promote", "tiny@v3"),
            "There is no version 'tiny@v3'.",
        ),
        (("promote", "tiny@v2", "--interval", "soon"), "--interval"),
        (("promote", "other"), "There is no version 'other'"),
        (("promote", "tiny"), "tiny answers for tiny already"),
        (("promote", "tiny@v2", "--canary", "0"), "canary_percent must be above 0"),
        (("promote", "tiny@v2", "--step", "200"), "step_percent must be above 0 and at most 100"),
        (("promote", "tiny@v2", "--abort-if", "slow"), "abort_if must be conditions"),
        (("promote", "tiny@v3", "--model", "tiny"), "it goes with --data alone"),
        (("retire", "tiny@v3"), "There is no version 'tiny@v3'"),
        (("rollback", "other"), "There is no rollout of 'other'"),
    ],
)
def test_an_impossible_rollout_is_one_sentence(
    models: Models, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = models.run(*arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
