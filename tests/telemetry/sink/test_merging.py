"""Requests of several generations: one row per request for any order of their records."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace

from millrace.runtime.clock import SystemClock
from millrace.schemas.chat.asked import Api
from millrace.schemas.records import Attempt, RequestRecord, Status
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.sink.merging import merge_generations
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import GENERATION_ROWS, REQUESTS, check, table_of
from tests.telemetry.records import NOW_NS, request_record

_MS = 1_000_000
# The beginning of a minute of yesterday.
_RECEIVED_NS = (NOW_NS // (86_400 * 10**9) * 86_400 - 3_600) * 10**9
_SUMS = (
    "sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(cost), sum(device_us), "
    "sum(device_cost), sum(num_preemptions)"
)
_ROW = (
    "num_generations, prompt_tokens, cached_tokens, completion_tokens, cost, device_us, queue_ms, "
    "ttft_ms, tpot_ms, total_ms, finish_reason, status, error_code, worker, length(lives), batch_id"
)


def part(choice: int, round_: int = 0, **given: Any) -> RequestRecord:
    """A generation of ``req``, which has a prompt of 15 tokens, received after 0 ms, begun after
    10 and ended after 100 ms and as many more as its choice says."""
    end = f".{choice}" * (choice > 0) + f"-r{round_}" * (round_ > 0)
    ended_ms = given.pop("ended_ms", 100 + choice)
    is_paid = not choice or bool(round_)
    record = replace(
        request_record(1),
        request_id=f"req{end}",
        parent_id="req",
        choice=choice,
        round=round_,
        tenant="acme",
        model_served="demo",
        worker_id=f"w-{choice}",
        prompt_tokens=15 * is_paid,
        cached_tokens=4 * is_paid,
        completion_tokens=5,
        cost=Decimal("0.0015") * is_paid + Decimal("0.0005"),
        device_us=100,
        tpot_us=1_000.0 * (choice + 1),
        queue_ms=10.0,
        ttft_ms=20.0,
        total_ms=float(ended_ms),
        finish_reason="stop",
        received_ns=_RECEIVED_NS,
        started_ns=_RECEIVED_NS + 10 * _MS,
        first_token_ns=_RECEIVED_NS + (20 + choice) * _MS,
        done_ns=_RECEIVED_NS + ended_ms * _MS,
    )
    return replace(record, **given)


THREE = [part(0), part(1, attempts=(Attempt(epoch=1, worker_id="w-9"),)), part(2)]


async def stored(store: Store, record: RequestRecord, sequence: int) -> list[int]:
    """Store a record as the sink does."""
    check(record)
    table = table_of(record)
    columns = table.to_columns([record], [sequence])
    await store.insert(table, columns, f"{record.request_id}:{sequence}")
    if table is REQUESTS:
        return [record.done_ns]
    return await merge_generations(store, [record.parent_id])


async def test_choices_in_any_order_and_twice_are_one_request(store: Store) -> None:
    expected = (3, 15, 4, 15, Decimal("0.003"), 300, 10.0, 20.0, 2.0, 102.0)
    ends = ("stop", "done", "", "w-2", 1, "")
    for order in itertools.permutations(range(3)):
        await store.command("TRUNCATE TABLE requests")
        await store.command("TRUNCATE TABLE generation_rows")
        for number in (*order, order[0]):
            await stored(store, THREE[number], number + 1)
        assert await store.rows(f"SELECT {_ROW} FROM requests FINAL") == [(*expected, *ends)]
    (of_requests,) = await store.rows(f"SELECT {_SUMS} FROM requests FINAL")
    (of_generations,) = await store.rows(f"SELECT {_SUMS} FROM generations")
    assert of_requests == of_generations


async def test_generations_hold_those_of_all_requests(store: Store) -> None:
    """A request of one generation is in one table only, and one of the generations all the same."""
    alone = replace(request_record(7), request_id="alone", metadata={"a": "b"})
    for number, record in enumerate((part(0), part(0, 1, ended_ms=300), part(1), alone)):
        await stored(store, record, number + 1)
    rows = await store.rows(
        "SELECT request_id, generation_id, choice, round, tpot_ms FROM generations FINAL "
        "ORDER BY generation_id"
    )
    assert [row[:4] for row in rows] == [
        ("alone", "alone", 0, 0),
        ("req", "req", 0, 0),
        ("req", "req-r1", 0, 1),
        ("req", "req.1", 1, 0),
    ]
    assert all(row[4] > 0 for row in rows)
    assert await store.rows("SELECT count() FROM generation_rows FINAL") == [(3,)]
    # The second round pays for its own prompt.
    assert await store.rows(
        "SELECT prompt_tokens, num_generations FROM requests_once WHERE request_id = 'req'"
    ) == [(30, 3)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # The first choice was never dispatched, the others answered.
        (
            [part(0, status=Status.SHED, finish_reason="", completion_tokens=0), part(1)],
            ("shed", "", ""),
        ),
        # One failed, and the rest was cancelled because of it.
        (
            [
                part(0, status=Status.CANCELLED, finish_reason="", ended_ms=50),
                part(1, status=Status.FAILED, finish_reason="", error_code="later", ended_ms=70),
                part(2, status=Status.FAILED, finish_reason="", error_code="first", ended_ms=60),
            ],
            ("failed", "first", ""),
        ),
        # The last round of the first choice is how the answer ended.
        (
            [part(0, finish_reason="tool_calls"), part(0, 1, finish_reason="length"), part(1)],
            ("done", "", "length"),
        ),
    ],
)
async def test_how_a_request_of_several_ended(
    store: Store, parts: list[RequestRecord], expected: tuple[str, str, str]
) -> None:
    for number, record in enumerate(parts):
        await stored(store, record, number + 1)
    assert await store.rows("SELECT status, error_code, finish_reason FROM requests FINAL") == [
        expected
    ]


async def test_a_line_that_was_shed_and_queued_again_is_one_request(store: Store) -> None:
    """The request ends as its last attempt did and was received with the first.

    The first attempt was received in another minute, and its record comes last.
    """
    minute_ns = 60 * 10**9
    first = part(
        0,
        batch_id="batch-1",
        status=Status.SHED,
        finish_reason="",
        prompt_tokens=15,
        cached_tokens=0,
        completion_tokens=0,
        cost=Decimal(0),
        started_ns=0,
        first_token_ns=0,
    )
    second = replace(
        part(0, batch_id="batch-1"),
        request_id="req-1",
        attempt=1,
        received_ns=_RECEIVED_NS + minute_ns,
        started_ns=_RECEIVED_NS + minute_ns + 5 * _MS,
        done_ns=_RECEIVED_NS + minute_ns + 50 * _MS,
    )
    rollups = Rollups(store, SystemClock(), interval_s=1.0)
    counts = "SELECT sum(requests), sum(done), sum(shed), sum(cost) FROM usage_by_minute FINAL"
    for number, record in enumerate((second, first)):
        rollups.touched(await stored(store, record, number + 1))
        await rollups.settle()
        assert await store.rows(counts) == [(1, 1, 0, Decimal("0.002"))]
    assert await store.rows(
        "SELECT request_id, num_generations, status, batch_id, queue_ms, total_ms, cost "
        "FROM requests FINAL"
    ) == [("req", 2, "done", "batch-1", 60_005.0, 60_050.0, Decimal("0.002"))]


async def test_minutes_follow_the_row_of_a_request(store: Store) -> None:
    """A later generation moves it to another minute, and a record that comes late changes it
    without another end: both are counted at once, and the comparison finds nothing left."""
    rollups = Rollups(store, SystemClock(), interval_s=1.0)
    counts = "SELECT minute, requests, completion_tokens FROM usage_by_minute FINAL ORDER BY minute"
    late = part(0, 1, ended_ms=90_000)
    for number, record in enumerate((part(0), late, part(1))):
        rollups.touched(await stored(store, record, 10 - number))
        await rollups.settle()
        ((_, num_requests, num_tokens),) = await store.rows(counts)
        assert (num_requests, num_tokens) == (1, 5 * (number + 1))
    assert await rollups.reconcile() == 0


async def test_ids_are_no_part_of_a_statement(store: Store) -> None:
    odd = "it's \\ a \t 'test'"
    await stored(store, part(0, parent_id=odd, request_id=odd), 1)
    assert await store.rows("SELECT request_id FROM requests FINAL") == [(odd,)]


def test_every_column_of_a_request_is_one_of_its_generations() -> None:
    assert set(REQUESTS.column_names) < set(GENERATION_ROWS.column_names)


async def test_tools_that_rounds_and_choices_called_are_those_of_the_request(store: Store) -> None:
    asked: dict[str, Any] = {
        "api": Api.CHAT,
        "stream": True,
        "max_tokens": 9,
        "deadline_ns": _RECEIVED_NS,
    }
    rounds = [
        part(0, called_tools=("look", "find"), num_tool_calls=2, **asked),
        part(0, 1, called_tools=("write",), num_tool_calls=1, **asked),
        part(1, called_tools=("look",), num_tool_calls=1, **asked),
    ]
    for sequence, record in enumerate(reversed(rounds), start=1):
        await stored(store, record, sequence)
    assert await store.rows(
        "SELECT api, stream, max_tokens, deadline_at = received_at, called_tools, num_tool_calls "
        "FROM requests FINAL"
    ) == [("chat", True, 9, True, ["look", "find", "write", "look"], 4)]
