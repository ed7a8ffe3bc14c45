"""Options and exit of ``millrace stages``."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.cli.main import main
from tests.support.engine.stages import Stages
from tests.support.servers import free_port
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--join", "nowhere"], "--join is 'nowhere'; write host:port"),
        (["--join", "a:1", "--max-stages", "0"], "--max-stages must be at least 1"),
        (["--join", "a:1", "--token-file", "nothing"], "--token-file: nothing cannot be read"),
        (["--join", "a:1", "--token-file", "empty"], "--token-file: empty is empty"),
        (["--join", "a:1", "--model", "."], "holds no config.json; name a checkpoint's folder"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    assert main(["stages", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("millrace stages: ")
    assert message in error


async def test_stages_wait_for_a_worker_and_end_on_request(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "log", "--join", f"127.0.0.1:{free_port()}")
    try:
        await eventually(lambda: "Connection refused" in stages.log.read_text(), timeout_s=60.0)
        assert stages.stop() == 0
    finally:
        stages.kill()
