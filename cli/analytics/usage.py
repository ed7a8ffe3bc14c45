"""``millrace usage``: usage and cost of a tenant in a time range."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal, localcontext
from typing import Any

import msgspec

from millrace.cli.analytics.rows import Rows, render, table
from millrace.cli.analytics.store import ask_saved, saved_query
from millrace.cli.endpoints import add_data_argument
from millrace.schemas.errors import MillraceError, ParameterError

_BY = ("tenant", "key", "day", "model", "user", "adapter", "refusal")
_REFUSALS = "refusals"
_COUNTS = frozenset(
    {
        "refused",
        *("requests", "done", "cancelled", "expired", "shed", "failed", "device_us"),
        *("energy_j", "energy_requests"),
        *("prompt_tokens", "computed_tokens", "cached_tokens", "completion_tokens"),
    }
)
_MONEY = frozenset({"cost", "device_cost", "amount", "by_price_book", "difference"})
_PRICES = frozenset({"input_per_million", "cached_input_per_million", "output_per_million"})
_CURRENCY = "currency"
_TOTAL = "total"
# Digits of a Decimal(38, 12) summed a million times.
_DIGITS = 60
_MAX_SHOWN_CHARS = 2_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace usage``."""
    parser = subparsers.add_parser(
        "usage",
        help="show usage and cost of tenants",
        description="Add up requests, tokens, prices and device costs of a time range exactly: on "
        "the system that runs on DIR, else on the store of its last run. Times are dates (their "
        "first moment in UTC) or RFC 3339; TO is not included. Tables and JSON end with totals "
        "for each currency and with refusals; CSV has neither, so that its columns can be summed "
        "(--by refusal gives a CSV of refusals).",
    )
    parser.add_argument("--tenant", default="", metavar="T", help="default: all tenants")
    parser.add_argument("--model", default="", metavar="M", help="only of this model")
    parser.add_argument("--from", dest="begin", required=True, type=_moment, metavar="FROM")
    parser.add_argument("--to", dest="end", type=_moment, metavar="TO", help="default: now")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--by", choices=_BY, default="tenant", help="default: %(default)s")
    form.add_argument(
        "--invoice",
        action="store_true",
        help="list by model, adapter, tier and price version, with the price book's amounts",
    )
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the usage; return 0, or 1 if the engine refuses the query. Raises ParameterError and
    NoStoreError."""
    from millrace.telemetry.store.reading import QueryError

    end = arguments.end if arguments.end is not None else _next_minute(time.time())
    if arguments.begin >= end:
        raise ParameterError(
            "from", f"--from {shown(arguments.begin)} must be before --to {shown(end)}"
        )
    if arguments.invoice and arguments.model:
        raise ParameterError("model", "an invoice covers all models: leave --model out")
    of_refusals = arguments.by == "refusal"
    if of_refusals and arguments.model:
        raise ParameterError("model", "refusals have no model: leave --model out")
    query = "invoice" if arguments.invoice else f"usage_by_{arguments.by}"
    given = {"from_s": arguments.begin, "to_s": end, "tenant": arguments.tenant}
    of_models = given if arguments.invoice else {**given, "model": arguments.model}
    refused = None
    try:
        rows = _whole(*((_REFUSALS, given) if of_refusals else (query, of_models)), arguments)
        if not (of_refusals or arguments.invoice or arguments.model):
            refused = _whole(_REFUSALS, given, arguments)
    except QueryError as error:
        print(f"millrace usage: {error.message[:_MAX_SHOWN_CHARS].strip()}", file=sys.stderr)
        return 1
    if arguments.format == "csv":
        sys.stdout.write(render(_for_spreadsheets(rows), "csv"))
    elif arguments.format == "json":
        document = {"from": shown(arguments.begin), "to": shown(end), "tenant": arguments.tenant}
        sys.stdout.write(as_json(document, rows, refused))
    else:
        sys.stdout.write(table(rows, totals(rows)))
        if refused is not None and refused.rows:
            sys.stdout.write(f"\nRefused at the door\n{table(refused, totals(refused))}")
    return 0


def _whole(query: str, given: dict[str, Any], arguments: argparse.Namespace) -> Rows:
    """Return all rows, with money as Decimals. Raises MillraceError if rows were cut off."""
    limited = saved_query(query).parameters.get("rows")
    most = None if limited is None else limited.limit
    if most is not None:
        given = {**given, "rows": most}
    rows = with_decimals(ask_saved(query, given, arguments.data))
    if most is not None and len(rows.rows) >= most:
        raise MillraceError(f"there are {most} rows or more: ask for a shorter range or one tenant")
    return rows


def _for_spreadsheets(rows: Rows) -> Rows:
    """Escape texts that a spreadsheet would read as formulas: users of a tenant's keys choose their
    names."""
    from millrace.telemetry.http.answers import harmless

    cells = tuple(
        tuple(harmless(value) if isinstance(value, str) else value for value in row)
        for row in rows.rows
    )
    return Rows(rows.names, cells, rows.numeric)


def with_decimals(rows: Rows) -> Rows:
    """Convert money from text to Decimal; ClickHouse's answers carry it as text to stay exact."""
    is_money = [name in _MONEY or name in _PRICES for name in rows.names]
    converted = tuple(
        tuple(
            Decimal(value) if money and value is not None else value
            for value, money in zip(row, is_money, strict=True)
        )
        for row in rows.rows
    )
    numeric = tuple(money or number for money, number in zip(is_money, rows.numeric, strict=True))
    return Rows(rows.names, converted, numeric)


def totals(rows: Rows) -> list[tuple[Any, ...]]:
    """Return a row of totals for each currency: sums where they make sense, empty elsewhere. A sum
    with an unknown part is unknown."""
    if _CURRENCY not in rows.names:
        return [_total(rows.names, rows.rows, "")] if rows.rows else []
    at = rows.names.index(_CURRENCY)
    currencies = sorted({row[at] for row in rows.rows})
    return [
        _total(rows.names, [row for row in rows.rows if row[at] == currency], currency)
        for currency in currencies
    ]


def _total(names: Sequence[str], rows: Sequence[Sequence[Any]], currency: str) -> tuple[Any, ...]:
    total: list[Any] = []
    with localcontext() as context:
        context.prec = _DIGITS
        for place, name in enumerate(names):
            values = [row[place] for row in rows]
            if name == _CURRENCY:
                total.append(currency)
            elif name in _COUNTS or name in _MONEY:
                total.append(None if None in values else sum(values))
            else:
                total.append(_TOTAL if place == 0 else None)
    return tuple(total)


def as_json(document: dict[str, str], rows: Rows, refused: Rows | None = None) -> str:
    """Render one JSON object. Money is text with all its digits, since most JSON readers lose
    digits of numbers."""
    encode: Callable[[Any], bytes] = msgspec.json.Encoder(decimal_format="string").encode
    whole = {
        **document,
        "rows": [_named(rows.names, row) for row in rows.rows],
        "totals": [
            {
                name: value
                for name, value in _named(rows.names, row).items()
                if name in _COUNTS or name in _MONEY or name == _CURRENCY
            }
            for row in totals(rows)
        ],
    }
    if refused is not None:
        whole[_REFUSALS] = [_named(refused.names, row) for row in refused.rows]
    return msgspec.json.format(encode(whole), indent=2).decode() + "\n"


def _named(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    return {
        name: format(value, "f") if isinstance(value, Decimal) else value
        for name, value in zip(names, row, strict=True)
    }


def _moment(text: str) -> int:
    try:
        return parse_minute(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _next_minute(at_s: float) -> int:
    """Return the end of the minute that contains ``at_s``."""
    return (int(at_s) // 60 + 1) * 60


_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})")
_UNZONED = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?")
_MINUTE_S = 60


def parse_minute(text: str) -> int:
    """Parse a date (its first moment in UTC) or an RFC 3339 time on a full minute; return Unix
    time.

    Raises ValueError with the accepted formats.
    """
    if _DAY.fullmatch(text):
        moment = _read(text).replace(tzinfo=UTC)
    elif _TIME.fullmatch(text):
        moment = _read(text.upper())
    elif _UNZONED.fullmatch(text):
        raise ValueError(f"{text!r} does not say its time zone: end it with Z for UTC")
    else:
        raise ValueError(
            f"{text!r} is neither a date like 2026-11-01 nor a time like 2026-11-01T08:30:00Z"
        )
    at_s = moment.timestamp()
    if at_s <= 0:
        raise ValueError(f"{text!r} is before 1970")
    if at_s % _MINUTE_S:
        raise ValueError(f"{text!r} is not on a full minute, and figures are kept by the minute")
    return int(at_s)


def shown(at_s: int) -> str:
    """Format a Unix time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _read(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"there is no {text}: {error}") from None
