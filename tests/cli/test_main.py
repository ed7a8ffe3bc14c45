"""The command line as a whole: usage errors, exit codes, where a system is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.cli.endpoints import Endpoints, locate, read_endpoints
from millrace.cli.main import main
from millrace.schemas.errors import ConfigError

ENDPOINTS = {
    "http": "http://127.0.0.1:8001",
    "nats": "nats://127.0.0.1:4333",
    "redis": "redis://127.0.0.1:6333/0",
    "kafka": "127.0.0.1:9333",
    "clickhouse": "http://127.0.0.1:8333",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "endpoints.json").write_text(json.dumps(ENDPOINTS))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["publish"], "--prompt"),
        (["publish", "--prompt", "x", "--file", "y"], "not allowed with"),
        (["publish", "--prompt", "x", "--stream", "--no-wait"], "not allowed with"),
        (["publish", "--prompt", "x", "--tier", "gold"], "gold"),
        (["publish", "--prompt", "x", "--max-tokens", "many"], "many"),
        (["result"], "REQUEST_ID"),
        (["sql"], "SQL"),
        (["sql", "SELECT 1", "--format", "xml"], "xml"),
        (["generate", "--input", "x"], "--output"),
    ],
)
def test_usage_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["publish", "--prompt", "x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["publish", "--prompt", "x", "--temperature", "3"], "temperature must be between"),
        (["publish", "--file", "no-such-file"], "no-such-file cannot be read"),
        (["sql", "DROP TABLE requests"], "DROP is not one of SELECT"),
        (["sql", "SELECT 1; SELECT 2"], "one statement at a time"),
        (["sql", "SELECT 1 FORMAT JSON"], "--format"),
        (["generate", "--input", "x", "--output", "y", "--model", "nope"], "'nope'"),
        (["generate", "--input", "x", "--output", "y", "--max-batch", "0"], "--max-batch"),
        (["generate", "--input", "x", "--output", "y", "--threads", "-1"], "--threads"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # generate sets these for its process; here they go back.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert shown.err.startswith(f"millrace {arguments[0]}: ")
    assert shown.err.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, cli.main\n"
        "cli.main.build_parser()\n"
        "print(*{'torch', 'nats', 'chdb', 'tokenizers', 'clickhouse_connect'} & set(sys.modules))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert finished.stdout.strip() == ""


def test_a_closed_output_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m millrace.cli --help | head -1; exit ${{PIPESTATUS[0]}}"
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert finished.returncode == 0
    assert "Traceback" not in finished.stderr


def test_endpoints_of_a_running_system(data: Path) -> None:
    assert read_endpoints(data) == Endpoints(**ENDPOINTS)
    config = locate(data)
    assert config.nats.url == ENDPOINTS["nats"]
    assert config.redis.url == ENDPOINTS["redis"]
    assert config.kafka.bootstrap_servers == ENDPOINTS["kafka"]
    assert config.clickhouse.url == ENDPOINTS["clickhouse"]


def test_an_address_on_the_command_line_comes_first(data: Path) -> None:
    config = locate(data, "nats://elsewhere:4222")
    assert config.nats.url == "nats://elsewhere:4222"
    assert config.clickhouse.url == ENDPOINTS["clickhouse"]


def test_without_a_running_system_the_environment_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_NATS__URL", "nats://bus:4222")
    assert read_endpoints(tmp_path) is None
    assert locate(tmp_path).nats.url == "nats://bus:4222"


@pytest.mark.parametrize("text", ["{", "{}", '{"http": 1}', json.dumps(ENDPOINTS | {"extra": "x"})])
def test_a_malformed_endpoints_file_is_named(data: Path, text: str) -> None:
    (data / "run" / "endpoints.json").write_text(text)
    with pytest.raises(ConfigError, match=r"endpoints\.json is malformed"):
        read_endpoints(data)
