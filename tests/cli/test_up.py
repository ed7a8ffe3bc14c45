"""What ``millrace up`` makes of its arguments, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.main import main
from cli.models import catalogue_for
from registry.catalogue import load_catalogue
from tests.support.checkpoints_made import write_checkpoint


def test_only_the_chosen_models_are_offered(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mine")
    file, names = catalogue_for("", [str(tmp_path / "mine")], tmp_path / "models.yaml")
    assert names == ("mine",)
    assert load_catalogue(file).names() == ("mine",)


def test_a_model_given_twice_runs_once(tmp_path: Path) -> None:
    _, names = catalogue_for("", ["demo", "demo"], tmp_path / "models.yaml")
    assert names == ("demo",)


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--gateways", "0"]])
def test_a_count_of_none_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--data", str(tmp_path), *arguments]) == 2
    assert f"{arguments[0]} must be at least 1" in capsys.readouterr().err


def test_an_address_of_other_servers_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_NATS__URL", "nats://somewhere:4222")
    assert main(["up", "--data", str(tmp_path)]) == 2
    assert "MILLRACE_NATS__URL" in capsys.readouterr().err


def test_an_unknown_setting_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_GATEWAY__PROT", "9000")
    assert main(["up", "--data", str(tmp_path)]) == 2
    assert "prot" in capsys.readouterr().err
