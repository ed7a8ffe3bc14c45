"""``millrace migrate``, and saved queries over the migrated tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace.cli.running import own_line
from millrace.telemetry.http.answers import load_queries
from millrace.telemetry.store.migrate import load_migrations
from millrace.telemetry.store.views import Changes
from tests.cli.analytics.left_store import run_on_store
from tests.cli.analytics.test_sql import write_endpoints


def test_a_store_from_nothing_and_what_is_asked_of_it(tmp_path: Path) -> None:
    names = [migration.name for migration in load_migrations()]
    names += Changes.of({}, "millrace").summary()
    statement = tmp_path / "count.sql"
    statement.write_text("-- How many.\nSELECT count() AS n, {who:String} AS who FROM requests;\n")
    odd = "it's a\\tab,\n\u4f60"
    ran = run_on_store(
        tmp_path,
        [],
        [
            ("migrate", "--dry-run"),
            ("migrate",),
            ("migrate",),
            ("migrate", "--dry-run"),
            ("sql", "--saved", "totals", "--param", "from_s=-60", "--format", "json"),
            ("sql", "--file", str(statement), "--param", f"who={odd}", "--format", "json"),
            ("sql", "--saved", "totals", "--param", "minutes=3"),
            ("sql", "--saved", "totals", "--param", "from_s=soon"),
            ("sql", "SELECT {n:UInt8}", "--param", "m=1"),
        ],
    )
    before, first, second, after, saved, from_file, unknown, wrong, missing = ran
    store = tmp_path / "clickhouse"
    assert before.out.splitlines() == [f"Would run on {store}:", *(f"  {name}" for name in names)]
    assert first.out.splitlines() == [f"Ran on {store}:", *(f"  {name}" for name in names)]
    assert second.out == after.out == f"The tables of {store} are up to date.\n"
    assert json.loads(saved.out)[0]["requests"] == 0
    assert json.loads(from_file.out) == [{"n": 0, "who": odd}]
    assert (unknown.code, wrong.code, missing.code) == (2, 2, 1)
    assert "has no parameter 'minutes'" in unknown.err
    assert "from_s must be a whole number" in wrong.err
    assert "n" in missing.err


def test_a_dry_run_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--dry-run", "--data", str(tmp_path)]) == 0
    assert "0020_schema.sql" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_store_of_a_system_that_runs_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_endpoints(tmp_path, clickhouse="http://127.0.0.1:9")
    (tmp_path / "run" / "up.pid").write_text(own_line())
    assert main(["migrate", "--data", str(tmp_path)]) == 2
    assert "its telemetry has brought the store up to date" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("clickhouse: {}\n", "names no store"),
        ("clickhouse: {url: 'http://127.0.0.1:9', path: /tmp/x}\n", "exactly one of"),
        ("clickhouse: {url: 'http://127.0.0.1:9'}\n", "127.0.0.1:9"),
    ],
)
def test_configurations(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert main(["migrate", "--config", str(file), "--dry-run"]) == 2
    assert why in capsys.readouterr().err


def test_no_folder_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--data", str(tmp_path / "nowhere")]) == 2
    assert "is not there" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_the_list_of_saved_queries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", "--list"]) == 0
    shown = capsys.readouterr().out
    for name, query in load_queries().items():
        assert f"{name} " in shown
        assert query.summary in shown
    assert "step_s=" in shown


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--saved", "no-such"], "no saved query 'no-such'; --list shows all"),
        (["SELECT 1", "--param", "x=1", "--param", "x=2"], "--param x is given twice"),
        (["--file", "no-such.sql"], "no-such.sql cannot be read"),
    ],
)
def test_what_sql_cannot_do(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sql", *arguments, "--data", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["SELECT 1", "--list"], ["--saved", "totals", "--file", "x"], ["SELECT 1", "--param", "=1"]],
)
def test_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sql", *arguments])
    assert ended.value.code == 2
