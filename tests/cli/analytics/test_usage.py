"""``millrace usage``: exact sums of a range, over the store that a system left."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from millrace.cli.analytics.rows import Rows
from millrace.cli.analytics.usage import parse_minute, shown, totals, with_decimals
from millrace.cli.main import main
from millrace.schemas.records import RefusalRecord, RequestRecord, Status
from tests.cli.analytics.left_store import run_on_store

# A day that no table's time to live has reached.
NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0).timestamp() - 86_400
DAY = datetime.fromtimestamp(NOON, UTC).strftime("%Y-%m-%d")
NEXT_DAY = datetime.fromtimestamp(NOON + 86_400, UTC).strftime("%Y-%m-%d")


def request(
    number: int,
    after_s: float,
    cost: str,
    *,
    tenant: str = "acme",
    user: str = "ann",
    model: str = "demo",
    status: Status = Status.DONE,
    currency: str = "USD",
    adapter: str = "",
) -> RequestRecord:
    done_ns = round((NOON + after_s) * 1e9)
    return RequestRecord(
        request_id=f"r{number}",
        tenant=tenant,
        user=user,
        model_requested=model,
        model_served=model,
        adapter=adapter,
        prompt_tokens=100,
        cached_tokens=25,
        completion_tokens=10,
        status=status,
        cost=Decimal(cost),
        currency=currency,
        price_version="2026-01",
        received_ns=done_ns - 10**9,
        done_ns=done_ns,
        device_us=1_500,
        device_cost=Decimal("0.000000000001"),
    )


RECORDS = [
    request(1, 0.0, "0.000000000001"),
    request(2, 30.0, "0.1", user="bob"),
    request(3, 61.0, "0.2", model="large", adapter="tone"),
    request(4, 119.999, "0", status=Status.FAILED),
    request(5, 10.0, "7", tenant="globex", currency="EUR"),
    request(6, 120.0, "1000000000000.000000000002"),
]


def ranged(begin: str, end: str, *more: str) -> list[str]:
    return ["usage", "--from", begin, "--to", end, *more]


def test_what_was_used(tmp_path: Path) -> None:
    minute = f"{DAY}T12:00:00Z"
    later = f"{DAY}T12:02:00Z"
    acme = ("--tenant", "acme")
    ran = run_on_store(
        tmp_path,
        RECORDS,
        [
            ranged(minute, later, *acme, "--format", "json"),
            ranged(DAY, NEXT_DAY, *acme, "--by", "model", "--format", "json"),
            ranged(DAY, NEXT_DAY, *acme, "--by", "user", "--format", "csv"),
            ranged(DAY, NEXT_DAY, "--by", "day"),
            ranged(DAY, NEXT_DAY, *acme, "--by", "adapter", "--model", "large"),
            ranged(DAY, NEXT_DAY, *acme, "--invoice", "--format", "json"),
            ranged(DAY, NEXT_DAY, "--tenant", "nobody", "--format", "json"),
            ranged(DAY, NEXT_DAY, "--tenant", "nobody"),
        ],
    )
    assert [(one.code, one.err) for one in ran] == [(0, "")] * len(ran)
    by_tenant, by_model, by_user, by_day, by_adapter, invoice, nothing, no_table = ran

    whole = json.loads(by_tenant.out)
    assert (whole["from"], whole["to"], whole["tenant"]) == (minute, later, "acme")
    [row] = whole["rows"]
    # The sixth request ended when the range did.
    assert (row["tenant"], row["requests"], row["done"], row["failed"]) == ("acme", 4, 3, 1)
    assert (row["prompt_tokens"], row["cached_tokens"]) == (400, 100)
    assert (row["completion_tokens"], row["device_us"]) == (40, 6_000)
    assert (row["cost"], row["device_cost"]) == ("0.300000000001", "0.000000000004")
    [total] = whole["totals"]
    assert (total["cost"], total["requests"], total["currency"]) == ("0.300000000001", 4, "USD")

    [total] = json.loads(by_model.out)["totals"]
    assert total["cost"] == "1000000000000.300000000003"
    assert [row["model"] for row in json.loads(by_model.out)["rows"]] == ["demo", "large"]

    users = list(csv.DictReader(io.StringIO(by_user.out)))
    assert {user["user"]: user["requests"] for user in users} == {"ann": "4", "bob": "1"}
    assert sum(Decimal(user["cost"]) for user in users) == Decimal("1000000000000.300000000003")

    lines = by_day.out.splitlines()
    assert lines[0].split()[:3] == ["day", "requests", "done"]
    # A day is one row for each currency, and so are the totals.
    assert [line.split()[0] for line in lines[2:4]] == [DAY, DAY]
    assert [line.split()[0] for line in lines[5:7]] == ["total", "total"]
    assert "1000000000000.300000000003" in lines[6]
    assert lines[7] == "(2 rows)"

    assert "tone" in by_adapter.out.splitlines()[2]
    assert [row["amount"] for row in json.loads(invoice.out)["rows"]]
    [total] = json.loads(invoice.out)["totals"]
    assert total["amount"] == "1000000000000.300000000003"
    assert "input_per_million" not in total

    assert json.loads(nothing.out)["rows"] == json.loads(nothing.out)["totals"] == []
    assert no_table.out.endswith("(0 rows)\n")


def refusal(number: int, after_s: float, count: int, tenant: str = "acme") -> RefusalRecord:
    at_ns = round((NOON + after_s) * 1e9)
    return RefusalRecord(
        gateway_id="gateway-1",
        number=number,
        recorded_ns=at_ns,
        tenant=tenant,
        key_id="5f0c2e9b71aa" if tenant else "",
        door="/v1/chat/completions",
        status=429 if tenant else 401,
        code="tokens_per_minute" if tenant else "invalid_api_key",
        limit="tokens_per_minute" if tenant else "",
        count=count,
        first_ns=at_ns,
        last_ns=at_ns,
        request_id=f"req-{number}",
    )


def test_the_usage_report_lists_refusals(tmp_path: Path) -> None:
    """Refusals follow usage, each counted once, and have a separate CSV; models have none."""
    refusals = [
        refusal(0, 1.0, 3),
        refusal(1, 2.0, 4),
        refusal(2, 3.0, 90, tenant=""),
        refusal(3, 86_400.0, 1_000),
    ]
    ran = run_on_store(
        tmp_path,
        RECORDS[:1],
        [
            ranged(DAY, NEXT_DAY),
            ranged(DAY, NEXT_DAY, "--tenant", "acme", "--format", "json"),
            ranged(DAY, NEXT_DAY, "--by", "refusal", "--format", "csv"),
            ranged(DAY, NEXT_DAY, "--by", "refusal", "--model", "demo"),
            ranged(DAY, NEXT_DAY, "--model", "demo"),
        ],
        refusals,
    )
    both, acme, refused, wrong, of_model = ran
    assert [one.code for one in ran] == [0, 0, 0, 2, 0]
    used, _, below = both.out.partition("\nRefused at the door\n")
    assert used.endswith("(1 row)\n")
    lines = [line.split() for line in below.splitlines()]
    assert lines[0][:3] == ["tenant", "api_key", "door"]
    assert lines[2][1:3] == ["401", "invalid_api_key"]
    assert lines[3][:2] == ["acme", "5f0c2e9b71aa"]
    assert lines[5] == ["total", "97"]
    [row] = json.loads(acme.out)["refusals"]
    assert (row["refused"], row["limit_reached"]) == (7, "tokens_per_minute")
    assert row["request_id"] == "req-1"
    assert len(json.loads(acme.out)["rows"]) == 1
    rows = list(csv.DictReader(io.StringIO(refused.out)))
    assert [(one["tenant"], one["refused"]) for one in rows] == [("", "90"), ("acme", "7")]
    assert "leave --model out" in wrong.err
    assert "Refused" not in of_model.out


def test_totals_are_exact_and_say_what_is_not_known() -> None:
    names = ("model", "requests", "cost", "by_price_book", "currency")
    rows = Rows(
        names,
        (
            ("a", 1, "12345678901234567890123456.000000000001", "1.5", "USD"),
            ("b", 2, "0.1", None, "USD"),
            ("c", 3, "0.2", "0.2", "EUR"),
        ),
        (False, True, False, False, False),
    )
    converted = with_decimals(rows)
    assert converted.numeric == (False, True, True, True, False)
    assert totals(converted) == [
        ("total", 3, Decimal("0.2"), Decimal("0.2"), "EUR"),
        ("total", 3, Decimal("12345678901234567890123456.100000000001"), None, "USD"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-01", "2026-11-01T00:00:00Z"),
        ("2026-11-01T08:30:00Z", "2026-11-01T08:30:00Z"),
        ("2026-11-01t08:30:00z", "2026-11-01T08:30:00Z"),
        ("2026-11-01T08:30:00+02:00", "2026-11-01T06:30:00Z"),
        ("2026-11-01 08:30:00.000-05:30", "2026-11-01T14:00:00Z"),
        ("2024-02-29", "2024-02-29T00:00:00Z"),
    ],
)
def test_dates_and_times_are_parsed_to_minutes(text: str, expected: str) -> None:
    assert shown(parse_minute(text)) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2026-11-31", "there is no 2026-11-31"),
        ("2026-02-29", "there is no"),
        ("2026-11-01T25:00:00Z", "there is no"),
        ("2026-11-01T08:30:00", "time zone"),
        ("2026-11-01T08:30", "time zone"),
        ("2026-11-01T08:30:01Z", "full minute"),
        ("2026-11-01T08:30:00.5Z", "full minute"),
        ("1969-12-31", "before 1970"),
        ("yesterday", "neither a date"),
        ("", "neither a date"),
        ("20261101", "neither a date"),
        ("2026-11-01T08:30:00Z ", "neither a date"),
    ],
)
def test_invalid_dates_and_times_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_minute(text)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (ranged("2026-11-02", "2026-11-01"), "--from 2026-11-02T00:00:00Z must be before"),
        (ranged("2026-11-01", "2026-11-01"), "must be before --to 2026-11-01T00:00:00Z"),
        (["usage", "--from", "2999-01-01"], "must be before"),
        (ranged("2026-11-01", "2026-12-01", "--invoice", "--model", "m"), "leave --model out"),
        (ranged("2026-11-01", "2026-12-01"), "nothing runs on"),
    ],
)
def test_ranges_that_make_no_sense(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--data", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["usage"], ["usage", "--from", "2026-11-01T08:30:00"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "--from" in capsys.readouterr().err


def test_no_name_becomes_a_formula_in_a_spreadsheet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("tenant", "user", "requests", "cost", "currency")
    users = ("=1+1", "@SUM(A1)", "-1", "ann")
    rows = Rows(
        names, tuple(("acme", user, 1, "-0.5", "USD") for user in users), (False,) * len(names)
    )
    monkeypatch.setattr("millrace.cli.analytics.usage.ask_saved", lambda *_: rows)
    assert main(ranged(DAY, NEXT_DAY, "--by", "user", "--format", "csv")) == 0
    answered = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["user"] for row in answered] == ["'=1+1", "'@SUM(A1)", "-1", "ann"]
    assert {row["cost"] for row in answered} == {"-0.5"}
