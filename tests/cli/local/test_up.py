"""Arguments of ``millrace up``, before any process starts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from millrace.cli.endpoints import Endpoints
from millrace.cli.greeting import greeting
from millrace.cli.local.live import StartingModels
from millrace.cli.local.models import SavedModels, catalogue_for
from millrace.cli.local.stack import Plan
from millrace.cli.local.up import _plan
from millrace.cli.main import build_parser, main
from millrace.registry.catalogue import load_catalogue
from millrace.schemas.config import Config, EngineConfig, GatewayConfig
from tests.support.engine.checkpoints_made import write_checkpoint


def _plan_of(data: Path, config: Config) -> Plan:
    models = StartingModels(known=load_catalogue(""), entries={}, saved=SavedModels())
    return Plan(data=data, config=config, models=("demo",), serving=models)


def test_only_the_chosen_models_are_offered(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mine")
    file, names = catalogue_for("", [str(tmp_path / "mine")], tmp_path / "models.yaml")
    assert names == ("mine",)
    assert load_catalogue(file).names() == ("mine",)


def test_a_model_given_twice_runs_once(tmp_path: Path) -> None:
    _, names = catalogue_for("", ["demo", "demo"], tmp_path / "models.yaml")
    assert names == ("demo",)


@pytest.mark.parametrize(
    "arguments", [["--workers", "0"], ["--gateways", "0"], ["--schedulers", "0"]]
)
def test_a_count_of_none_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--data", str(tmp_path), *arguments]) == 2
    assert f"{arguments[0]} must be at least 1" in capsys.readouterr().err


def test_the_engine_is_what_the_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    arguments = build_parser().parse_args(["up", "--engine", "simulated"])
    assert _plan(arguments, tmp_path).config.worker.engine.kind == "simulated"
    arguments = build_parser().parse_args(["up"])
    assert _plan(arguments, tmp_path).config.worker.engine.kind == "real"


def test_replicas_are_as_many_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    plan = _plan(build_parser().parse_args(["up"]), tmp_path)
    assert (plan.num_schedulers, plan.num_gateways) == (1, 1)
    arguments = ["up", "--schedulers", "3", "--gateways", "2"]
    plan = _plan(build_parser().parse_args(arguments), tmp_path)
    assert (plan.num_schedulers, plan.num_gateways) == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "first", "bounds"),
    [
        ([], 1, (1, 0)),
        (["--workers", "3"], 3, (1, 0)),
        (["--autoscale", "0:4"], 1, (0, 4)),
        (["--autoscale", "2:4"], 2, (2, 4)),
        (["--autoscale", "1:4", "--workers", "3"], 3, (1, 4)),
    ],
)
def test_autoscaling_says_how_many_workers_there_are_at_first(
    arguments: list[str], first: int, bounds: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    plan = _plan(build_parser().parse_args(["up", *arguments]), tmp_path)
    autoscale = plan.config.scheduler.autoscale
    assert plan.num_workers == first
    assert (autoscale.min_workers, autoscale.max_workers) == bounds


def test_roles_are_switched_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    arguments = ["up", "--workers", "prefill:1,decode:2"]
    plan = _plan(build_parser().parse_args(arguments), tmp_path)
    assert not plan.config.scheduler.switch_roles
    plan = _plan(build_parser().parse_args([*arguments, "--switch-roles"]), tmp_path)
    assert plan.config.scheduler.switch_roles


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--autoscale", "3"], "'3' is not MIN:MAX"),
        (["--autoscale", "3:2"], "MIN is 3"),
        (["--autoscale", "1:1000"], "between 1 and 256, got 1000"),
        (["--autoscale", "1:2", "--workers", "3"], "--workers 3 is more"),
        (["--config", "settings.yaml"], "min_workers is 3"),
        (["--autoscale", "1:2", "--workers", "prefill:1,decode:2"], "--workers 3 is more"),
        (["--engine", "simulated", "--workers", "prefill:1"], "Millrace's own engine"),
        (["--workers", "2", "--switch-roles"], "--switch-roles takes --workers with roles"),
        (["--workers", "0"], "--workers must be at least 1"),
    ],
)
def test_workers_that_cannot_be_are_refused_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "settings.yaml").write_text(
        "scheduler: {autoscale: {min_workers: 3, max_workers: 2}}"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["up", "--data", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("nats.*"))


def test_an_address_of_other_servers_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_NATS__URL", "nats://somewhere:4222")
    assert main(["up", "--data", str(tmp_path)]) == 2
    assert "MILLRACE_NATS__URL" in capsys.readouterr().err


def test_an_openai_server_has_to_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--data", str(tmp_path), "--engine", "openai"]) == 2
    assert "--engine openai needs --engine-url" in capsys.readouterr().err


def test_an_unknown_setting_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_GATEWAY__PROT", "9000")
    assert main(["up", "--data", str(tmp_path)]) == 2
    assert "prot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "-1"], "between 1 and 65535, got -1"),
        (["--port", "99999"], "between 1 and 65535, got 99999"),
        (["--host", "192.0.2.1"], "not an address of this machine"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_an_address_that_cannot_be_is_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--data", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("nats.*"))


def test_a_data_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["up", "--data", str(tmp_path / "file")]) == 2
    assert "cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "demanded"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_who_needs_a_key_is_told_how_to_make_one(host: str, demanded: bool, tmp_path: Path) -> None:
    endpoints = Endpoints(
        http="http://127.0.0.1:8000",
        nats="nats://127.0.0.1:4222",
        redis="redis://127.0.0.1:6379/0",
        kafka="127.0.0.1:9092",
        clickhouse="http://127.0.0.1:8123",
    )
    config = Config(gateway=GatewayConfig(host=host))
    message = greeting(endpoints, _plan_of(tmp_path / "a folder", config))
    assert "http://127.0.0.1:8000/ops" in message
    assert ("Authorization" in message) is demanded
    commands = re.findall(r"^ *millrace (keys .+)$", message, re.MULTILINE)
    assert len(commands) == demanded
    for command in commands:
        parsed = build_parser().parse_args(shlex.split(command))
        assert parsed.data == tmp_path / "a folder"


def test_weights_are_quantized_as_the_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    plan = _plan(build_parser().parse_args(["up", "--quantization", "int4"]), tmp_path)
    assert plan.config.worker.engine.quantization == "int4"
    assert _plan(build_parser().parse_args(["up"]), tmp_path).config.worker.engine == EngineConfig()


def test_tokens_are_proposed_as_the_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for choice in ("ngram", "off"):
        plan = _plan(build_parser().parse_args(["up", "--speculation", choice]), tmp_path)
        assert plan.config.worker.engine.speculation == choice
    for kind in ("draft", "eagle3"):
        plan = _plan(build_parser().parse_args(["up", "--speculation", f"{kind}=small"]), tmp_path)
        assert plan.config.worker.engine.speculation == f"{kind}={Path('small').resolve()}"
    for wrong in ("eagle", "draft=", "eagle3=", "eagle3", ""):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["up", "--speculation", wrong])


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "simulated"])
@pytest.mark.parametrize("by", ["option", "catalogue"])
@pytest.mark.parametrize("what", ["quantization int8", "speculation ngram"])
def test_another_engine_is_not_told_what_only_our_own_does(
    engine: str, by: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, value = what.split()
    write_checkpoint(tmp_path / "mine")
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text("models:\n  mine:\n    source: ./mine\n")
    options = [f"--{name}", value]
    if by == "catalogue":
        catalogue.write_text(catalogue.read_text() + f"    {name}: {value}\n")
        options = []
    options += ["--catalogue", str(catalogue), "--model", "mine", "--engine", engine]
    assert main(["up", "--data", str(tmp_path / "data"), *options]) == 2
    assert f"own engine, and {engine} runs this model" in capsys.readouterr().err
