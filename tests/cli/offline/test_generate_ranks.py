"""``millrace generate`` and ``millrace embed`` by several ranks, here and on another host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.cli.main import main
from tests.cli.offline.generating import generate
from tests.support.engine.stages import Stages
from tests.support.servers import free_port

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS = [{"prompt": "mill wheel", "max_tokens": 16, "temperature": 0, "ignore_eos": True}]
TOKEN = "stages-of-tests"


@pytest.fixture
def catalogue(tmp_path: Path, checkpoint: Path) -> Path:
    """Return a catalogue with the model ``split``, which runs on two ranks."""
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n  split:\n    source: {checkpoint}\n    parallel: {{tensor: 2}}\n")
    return file


def test_ranks_are_as_many_as_the_catalogue_says(
    tmp_path: Path, checkpoint: Path, catalogue: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = generate(tmp_path, checkpoint, REQUESTS)
    assert "2 ranks" not in caplog.text
    assert generate(tmp_path, "split", REQUESTS, "--catalogue", str(catalogue)) == alone
    assert "2 ranks" in caplog.text


def test_texts_are_embedded_by_as_many(
    tmp_path: Path,
    catalogue: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "mill wheel"}\n')
    options = ("--input", str(tmp_path / "in.jsonl"), "--catalogue", str(catalogue))
    assert main(["embed", "--model", "split", *options, "--pooling", "mean"]) == 0
    assert "2 ranks" in caplog.text
    assert json.loads(capsys.readouterr().out)["embedding"]


def test_another_host_computes_a_stage(tmp_path: Path, checkpoint: Path) -> None:
    alone = generate(tmp_path, checkpoint, REQUESTS)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    address = f"127.0.0.1:{free_port()}"
    stages = Stages(tmp_path / "stages.log", "--join", address, "--token-file", str(token))
    try:
        split = generate(
            tmp_path, checkpoint, REQUESTS,
            *("--pipeline-parallel", "2", "--remote-stages", "1"),
            *("--stages-address", address, "--stages-token-file", str(token)),
        )  # fmt: skip
        assert split == alone
        assert stages.stop() == 0
    finally:
        stages.kill()
