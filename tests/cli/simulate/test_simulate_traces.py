"""Traces: read, drawn, and taken from the analytics store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.bench.spread import fixed, parse_spread
from millrace.cli.main import main
from millrace.cli.simulate import history
from millrace.schemas.errors import ConfigError
from millrace.schemas.jobs import Tier
from millrace.simulation.traces.synthesise import (
    TenantShare,
    TraceKind,
    TraceRecipe,
    parse_tenants,
    synthesise,
)
from millrace.simulation.traces.trace import Texts, TraceRequest, read_trace
from millrace.telemetry.store.migrate import load_migrations

GOOD = '{"at_s": 1.5, "prompt_tokens": 10, "output_tokens": 5, "prefix": [["system", 4]]}'


# --- reading ---


def test_a_trace_is_read_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{GOOD}\n\n{{"at_s": 1, "prompt_tokens": 3, "output_tokens": 2}}\n')
    first, second = read_trace(path)
    assert (first.at_s, first.tenant, first.tier) == (1.0, "local", Tier.FREE)
    assert (second.prefix, second.own_tokens, second.total_tokens) == ((("system", 4),), 6, 15)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("[1]", "object"),
        ('{"at_s": 1, "prompt_tokens": 3}', "output_tokens"),
        ('{"at_s": -1, "prompt_tokens": 3, "output_tokens": 2}', "at_s"),
        ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 2}', "prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": 3, "output_tokens": 2, "teir": "pro"}', "teir"),
        ('{"at_s": 1, "prompt_tokens": 3, "output_tokens": 2, "tier": "gold"}', "gold"),
        ('{"at_s": 1, "prompt_tokens": 3, "output_tokens": 2, "max_tokens": 1}', "max_tokens"),
        ('{"at_s": 1, "prompt_tokens": 3, "output_tokens": 2, "deadline_s": 0}', "deadline_s"),
        ('{"at_s": 1, "prompt_tokens": 3, "output_tokens": 2, "prefix": [["a", 3]]}', "prefix"),
        ('{"at_s": 1, "prompt_tokens": 3, "output_tokens": 2, "tenant": ""}', "tenant"),
        ('{"at_s": "1", "prompt_tokens": 3, "output_tokens": 2}', "at_s"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_trace(path)
    assert message in caught.value.message
    assert main(["simulate", "--trace", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_a_file_without_requests_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "absent.jsonl"):
        with pytest.raises(ConfigError, match=name):
            read_trace(tmp_path / name)


# --- texts ---


def test_prompts_agree_exactly_as_far_as_they_share() -> None:
    texts = Texts(seed=1)
    shared = TraceRequest(at_s=0, prompt_tokens=10, output_tokens=3, prefix=(("p", 6),))
    one, other = texts.prompt(shared, "r1"), texts.prompt(shared, "r2")
    assert one[:6] == other[:6]
    assert not set(one[6:]) & set(other[6:])
    assert len(one) == 10


def test_a_turn_goes_on_behind_the_answer_before_it() -> None:
    texts = Texts(seed=1)
    first = TraceRequest(at_s=0, prompt_tokens=10, output_tokens=3, session="s")
    second = TraceRequest(at_s=9, prompt_tokens=20, output_tokens=3, session="s")
    begin = texts.first_answer_token(first, "r1")
    expected = (*texts.prompt(first, "r1"), begin, begin + 1, begin + 2)
    assert texts.prompt(second, "r2")[:13] == expected
    foreign = msgspec.structs.replace(second, tenant="somebody else")
    assert texts.prompt(foreign, "r3")[0] != expected[0]


# --- drawing ---


def _recipe(kind: TraceKind, **changes: Any) -> TraceRecipe:
    fields: dict[str, Any] = {
        "kind": kind,
        "rate_per_s": 20.0,
        "duration_s": 200.0,
        "tenants": (TenantShare(name="a"),),
        "input_tokens": parse_spread("lognormal:200:0.5:2000"),
        "output_tokens": fixed(50),
        "period_s": 200.0,
        "think_s": 2.0,
    }
    return TraceRecipe(**(fields | changes))


@pytest.mark.parametrize("kind", list(TraceKind))
def test_a_recipe_gives_its_rate_and_always_the_same(kind: TraceKind) -> None:
    requests = synthesise(_recipe(kind))
    assert requests == synthesise(_recipe(kind))
    assert requests != synthesise(_recipe(kind, seed=1))
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    assert 0 <= requests[0].at_s <= requests[-1].at_s <= 200.0
    assert 0.8 * 4_000 < len(requests) < 1.2 * 4_000


def _spread_of_counts(requests: list[TraceRequest]) -> float:
    """Variance over mean of the arrivals in each second: 1 of a Poisson process."""
    counts = Counter(int(request.at_s) for request in requests)
    values = [counts[second] for second in range(200)]
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean


def test_kinds_differ_in_how_requests_arrive() -> None:
    steady, bursty = (
        _spread_of_counts(synthesise(_recipe(kind)))
        for kind in (TraceKind.POISSON, TraceKind.BURSTY)
    )
    assert 0.6 < steady < 1.5 < 2.5 < bursty
    day = [request.at_s for request in synthesise(_recipe(TraceKind.DIURNAL))]
    morning = sum(at_s < 100 for at_s in day)
    assert morning > 2 * (len(day) - morning)


def test_conversations_grow_by_what_was_said() -> None:
    recipe = _recipe(TraceKind.MULTITURN, num_system_prompts=2, system_tokens=30, rate_per_s=5.0)
    by_session: dict[str, list[TraceRequest]] = {}
    for request in synthesise(recipe):
        by_session.setdefault(request.session, []).append(request)
    assert max(map(len, by_session.values())) > 3
    for turns in by_session.values():
        assert len({(turn.tenant, turn.prefix) for turn in turns}) == 1
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
    assert {turns[0].prefix for turns in by_session.values()} == {
        (("system-1", 30),),
        (("system-2", 30),),
    }


def test_stated_lengths_bound_answers() -> None:
    recipe = _recipe(TraceKind.POISSON, output_tokens=parse_spread("uniform:10:90"), max_tokens=64)
    requests = synthesise(recipe)
    assert {request.max_tokens for request in requests} == {64}
    assert max(request.output_tokens for request in requests) == 64


def test_tenants_have_their_shares() -> None:
    tenants = parse_tenants("quiet:pro:1,noisy::3")
    assert tenants[0] == TenantShare(name="quiet", tier=Tier.PRO, weight=1.0)
    counts = Counter(
        request.tenant for request in synthesise(_recipe(TraceKind.POISSON, tenants=tenants))
    )
    assert 2.5 < counts["noisy"] / counts["quiet"] < 3.5
    assert [tenant.name for tenant in parse_tenants("3")] == ["t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 0", "--rate"),
        ("--rate 1 --tenants 0", "--tenants"),
        ("--rate 1 --tenants a:gold", "gold"),
        ("--rate 1 --tenants a:pro:0", "--tenants"),
        ("--rate 1 --duration soon", "--duration"),
        ("--rate 1 --swing 2", "--swing"),
        ("--rate 1 --turns 0.5", "--turns"),
        ("--rate 1 --input-tokens few", "few"),
        ("--rate 1 --max-tokens -1", "--max-tokens"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(["simulate", "synthesise", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


# --- from the store ---


def _answer(rows: list[list[Any]]) -> bytes:
    kinds = ["Int64", "String", "String", "String", "String", "UInt32", "UInt32"]
    meta = [{"name": f"c{place}", "type": kind} for place, kind in enumerate(kinds)]
    return json.dumps({"meta": meta, "data": rows, "rows": len(rows)}).encode()


def test_history_becomes_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    rows = [
        ["1700000000000000", "acme", "pro", "demo", "s1", 100, 20],
        ["1700000001500000", "acme", "batch", "demo", "", 7, 3],
    ]

    def ask(sql: str, data: Path) -> bytes:
        asked.append(sql)
        return _answer(rows)

    monkeypatch.setattr(history, "ask", ask)
    first, second = history.read_history(Path("data"), "2023-11-14", "2023-11-14T23:00")
    assert (first.at_s, first.tier, first.session) == (0.0, Tier.PRO, "s1")
    assert (second.at_s, second.tier, second.prompt_tokens) == (1.5, Tier.BATCH, 7)
    assert len(asked) == 1
    assert "'2023-11-14 00:00:00'" in asked[0]
    assert "'2023-11-14 23:00:00'" in asked[0]


def test_long_histories_are_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_PAGE_ROWS", 2)
    rows = [[str(10**15 + n), "t", "free", "demo", "", 5, 5] for n in range(4)]

    def ask(sql: str, data: Path) -> bytes:
        offset = int(sql.rpartition(" ")[2])
        return _answer(rows[offset : offset + 2])

    monkeypatch.setattr(history, "ask", ask)
    assert len(history.read_history(Path("data"), "2023-11-14", "2023-11-15")) == 4


def test_histories_of_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ask", lambda sql, data: _answer([]))
    with pytest.raises(ConfigError, match="no answered requests"):
        history.read_history(Path("data"), "2023-11-14", "2023-11-15")
    with pytest.raises(ConfigError, match="--until"):
        history.read_history(Path("data"), "2023-11-14", "'; DROP TABLE requests")


def test_history_from_a_store_that_a_system_left(tmp_path: Path) -> None:
    """Another process writes the store because the engine holds it until its process ends."""
    script = (
        "import sys, chdb\n"
        "store = chdb.connect(sys.argv[1])\n"
        "store.query('CREATE DATABASE millrace')\n"
        "store.query('USE millrace')\n"
        "store.query(sys.argv[2])\n"
        "store.query('INSERT INTO requests (request_id, tenant, tier, model_served, session, "
        "prompt_tokens, completion_tokens, received_at, done_at) VALUES "
        "(\\'a\\', \\'acme\\', \\'pro\\', \\'demo\\', \\'s\\', 50, 7, "
        "\\'2026-01-31 10:00:00.5\\', now64()), "
        "(\\'b\\', \\'acme\\', \\'pro\\', \\'demo\\', \\'s\\', 90, 8, "
        "\\'2026-01-31 10:00:02\\', now64())')\n"
        "store.close()\n"
    )
    statements = load_migrations()[0].statements
    create = next(one for one in statements if "CREATE TABLE IF NOT EXISTS requests\n" in one)
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "clickhouse"), create], check=True)
    saved = tmp_path / "trace.jsonl"
    command = "-m millrace.cli simulate --from-clickhouse --since 2026-01-31 --until 2026-02-01"
    command += f" --data {tmp_path} --save-trace {saved}"
    subprocess.run([sys.executable, *command.split()], check=True, capture_output=True)
    first, second = read_trace(saved)
    assert (first.at_s, first.prompt_tokens, first.session) == (0.0, 50, "s")
    assert (second.at_s, second.output_tokens, second.tier) == (1.5, 8, Tier.PRO)
