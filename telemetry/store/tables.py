"""Conversion of records to columns of their tables, with checks.

``_column`` derives a column from a field's name and type. Exceptions are declared below: the type,
the value, and the computation of the row of a request with several generations.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.records import (
    MAX_CALLED_TOOLS,
    MAX_RECORD_TIME_NS,
    Attempt,
    DeliveryRecord,
    Record,
    RefusalRecord,
    RequestRecord,
    TranscriptRecord,
    WorkerLossRecord,
    WorkerSample,
)
from millrace.telemetry.store.store import PlainTable

R = TypeVar(
    "R",
    RequestRecord,
    DeliveryRecord,
    WorkerSample,
    TranscriptRecord,
    RefusalRecord,
    WorkerLossRecord,
)

_STRING = "LowCardinality(String)"
_TIME = "DateTime64(6, 'UTC')"
_LIVES = (
    f"Array(Tuple(epoch UInt32, worker String, started_at Nullable({_TIME}), "
    f"ended_at Nullable({_TIME}), device_us UInt64))"
)
# Separate from the tuples of ``lives``, since sinks of the previous version still write those.
_PULLS = "Array(Tuple(epoch UInt32, kv_source String, pulled_tokens UInt32))"
_MAX_MEASURE = 1e300
_COST_STEP = Decimal("0.000000000001")
# Leaves room for the column's 12 decimal digits within a Decimal's precision.
_MAX_COST = Decimal(10) ** 15
# Maximum of UInt64 (microseconds and bytes): the largest integer that JSON's numbers hold exactly.
_MAX_COUNTS = {"UInt16": (1 << 16) - 1, "UInt32": (1 << 32) - 1, "UInt64": 1 << 53}


class Column(msgspec.Struct, frozen=True):
    """Column: its name, its ClickHouse type, its value in a record, and the fields of that value;
    none: the field of the column's name."""

    name: str
    type: str
    value: Callable[[Any], Any]
    made_of: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return self.made_of or (self.name,)


class Table(PlainTable, Generic[R], frozen=True):
    """Table with the conversion of records to its columns; the place in the outbox is its last
    column."""

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, name: str, columns: Sequence[Column]) -> Table[R]:
        return cls(
            name,
            (*(column.name for column in columns), "outbox_sequence"),
            (*(column.type for column in columns), "UInt64"),
            tuple(columns),
        )

    def to_columns(self, records: Sequence[R], sequences: Sequence[int]) -> list[list[Any]]:
        """Return a list for each column. The records have passed ``check``."""
        columns = [[column.value(record) for record in records] for column in self.columns]
        columns.append(list(sequences))
        return columns


def table_of(record: Record) -> Table[Any]:
    """Return the table of a record."""
    if isinstance(record, RequestRecord) and record.parent_id:
        return GENERATION_ROWS
    return _TABLES[type(record)]


def check(record: Record) -> None:
    """Raise MalformedMessageError, naming the field, for a value that its column cannot hold."""
    if not _identity(record):
        raise MalformedMessageError("the record does not say what it is about: its id is empty")
    fields = _FIELDS[type(record)]
    _check_counts(record, fields.counts)
    if isinstance(record, RequestRecord):
        for attempt in record.attempts:
            _check_counts(attempt, _ATTEMPT_COUNTS, "attempts.")
    for name in fields.measures:
        measure = getattr(record, name)
        if measure is not None and not -_MAX_MEASURE < measure < _MAX_MEASURE:
            raise MalformedMessageError(f"{name} must be a finite number, got {measure}")
    for name in fields.amounts:
        amount = getattr(record, name)
        if not (amount.is_finite() and abs(amount) < _MAX_COST):
            raise MalformedMessageError(f"{name} is not an amount of money: {amount}")


def _identity(record: Record) -> str:
    match record:
        case WorkerSample() | WorkerLossRecord():
            return record.worker_id
        case RefusalRecord():
            return record.gateway_id
        case _:
            return record.request_id


def _check_counts(
    part: Record | Attempt, counts: tuple[tuple[str, int], ...], prefix: str = ""
) -> None:
    for name, limit in counts:
        count = getattr(part, name)
        if count is not None and not 0 <= count <= limit:
            raise MalformedMessageError(
                f"{prefix}{name} must be between 0 and {limit}, got {count}"
            )


class _Fields(msgspec.Struct, frozen=True):
    """Fields of a kind of record that need a check, by type of value."""

    counts: tuple[tuple[str, int], ...]
    measures: tuple[str, ...]
    amounts: tuple[str, ...]

    @classmethod
    def of(cls, kind: type[Record | Attempt]) -> _Fields:
        types = _types_of(kind)
        return cls(
            counts=tuple(
                (name, _limit(name)) for name in types if types[name] in (int, int | None)
            ),
            measures=tuple(name for name in types if types[name] in (float, float | None)),
            amounts=tuple(name for name in types if types[name] is Decimal),
        )


def _types_of(kind: type[Record | Attempt]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _limit(name: str) -> int:
    return MAX_RECORD_TIME_NS if name.endswith("_ns") else _MAX_COUNTS[_count_type(name)]


def _count_type(name: str) -> str:
    if name.endswith(("_us", "_bytes")):
        return "UInt64"
    return "UInt16" if name in ("version", "status") else "UInt32"


_ATTEMPT_COUNTS = _Fields.of(Attempt).counts
_NAMES = {
    "gateway_id": "gateway",
    "session_id": "session",
    "version": "record_version",
    "worker_id": "worker",
}
# Text columns with a different value in most rows.
_TEXTS = (
    *("batch_id", "completion", "parent_id", "prompt"),
    *("request_id", "session_id", "trace_id", "user"),
)
# Fields that become NULL if the record has no value in the other field.
_NULL_UNLESS = {
    **{name: name for name in ("first_byte_ms", "longest_gap_ms", "intake_ms", "num_blocks")},
    **{name: name for name in ("dispatched_ns", "started_ns", "first_token_ns", "deadline_ns")},
    "queue_ms": "started_ns",
    "ttft_ms": "first_token_ns",
    "stream": "api",
    "num_free_blocks": "num_blocks",
    "step_ms_mean": "num_steps",
    # A CPU has no driver to query.
    "device_share": "device_memory_total_bytes",
    "device_memory_bytes": "device_memory_total_bytes",
    "device_memory_total_bytes": "device_memory_total_bytes",
}


def _column(field: str, kind: Any, name: str = "") -> Column:
    """Return the column of a field of this type."""
    name = name or _NAMES.get(field) or (f"{field[:-3]}_at" if field.endswith("_ns") else field)
    value: Callable[[Any], Any] = attrgetter(field)
    if kind is str:
        column_type = "String" if field in _TEXTS else _STRING
    elif isinstance(kind, enum.EnumType):
        column_type, value = _STRING, attrgetter(f"{field}.value")
    elif kind is int and field.endswith("_ns"):
        column_type, value = _TIME, lambda record: getattr(record, field) // 1000
    elif kind is Decimal:
        column_type = "Decimal(38, 12)"
        value = partial(_amount, field)
    else:
        count = _count_type(field)
        column_type = {
            bool: "Bool",
            int: count,
            int | None: f"Nullable({count})",
            float: "Float64",
            float | None: "Nullable(Float64)",
        }[kind]
    if field not in _NULL_UNLESS:
        return Column(name, column_type, value, (field,))
    has_value = attrgetter(_NULL_UNLESS[field])
    return Column(
        name,
        f"Nullable({column_type})",
        lambda record: value(record) if has_value(record) else None,
        (field,),
    )


def _amount(field: str, record: Any) -> Decimal:
    amount: Decimal = getattr(record, field).quantize(_COST_STEP)
    return amount


def _columns(
    kind: type[Record],
    *special: Column,
    names: Mapping[str, str] = {},
    left_out: Sequence[str] = (),
) -> tuple[Column, ...]:
    """Return the columns of a kind of record: the ``special`` ones, and derived ones of the other
    fields, except ``left_out``, renamed by ``names``."""
    by_field = {column.fields[0]: column for column in special}
    return tuple(
        by_field.get(field) or _column(field, of, names.get(field, ""))
        for field, of in _types_of(kind).items()
        if field not in left_out
    )


def _lives(record: RequestRecord) -> list[tuple[int, str, int | None, int | None, int]]:
    return [
        (
            attempt.epoch,
            attempt.worker_id,
            attempt.started_ns // 1000 or None,
            attempt.ended_ns // 1000 or None,
            attempt.device_us,
        )
        for attempt in record.attempts
    ]


def _pulls(record: RequestRecord) -> list[tuple[int, str, int]]:
    """Return the pulls of each attempt that pulled anything, including the attempt that ended the
    request."""
    pulls = [
        (attempt.epoch, attempt.kv_source, attempt.pulled_tokens)
        for attempt in record.attempts
        if attempt.pulled_tokens
    ]
    num_own_tokens = record.pulled_tokens - sum(num_tokens for _, _, num_tokens in pulls)
    if num_own_tokens > 0:
        pulls.append((record.epoch, record.kv_source, num_own_tokens))
    return pulls


# Columns of requests that may have several generations; REQUESTS has all other columns.
_OF_GENERATIONS = ("parent_id", "choice", "round", "attempt", "batch_id")
_COMMON = (
    *_columns(
        RequestRecord,
        Column("metadata", "Map(LowCardinality(String), String)", lambda r: r.metadata),
        Column(
            "tpot_us",
            "Nullable(Float64)",
            lambda r: r.tpot_us if r.completion_tokens > 1 else None,
        ),
        Column("lives", _LIVES, _lives, ("attempts",)),
        Column("called_tools", "Array(LowCardinality(String))", lambda r: list(r.called_tools)),
        left_out=("request_id", "lives", *_OF_GENERATIONS),
    ),
    Column("pulls", _PULLS, _pulls, ("attempts", "pulled_tokens")),
)
REQUESTS: Table[RequestRecord] = Table.of("requests", (_column("request_id", str), *_COMMON))
_BATCH_ID = _column("batch_id", str)
GENERATION_ROWS: Table[RequestRecord] = Table.of(
    "generation_rows",
    (
        _column("parent_id", str, "request_id"),
        _column("request_id", str, "generation_id"),
        *(_column(name, int) for name in ("choice", "round", "attempt")),
        _BATCH_ID,
        *_COMMON,
    ),
)

# Expressions for the row of a request with several generations, by column, over its generations'
# rows; {0} stands for the column. Other columns are those of the first generation.
_FIRST = "argMin({0}, (attempt, choice, round))"
# The last attempt at a line of a batch decides the request's end, the worst of its generations
# first; the error is the first one.
_SEVERITY = "indexOf(['done', 'cancelled', 'shed', 'expired', 'failed'], status)"
_SINCE = "(toUnixTimestamp64Micro({0}) - toUnixTimestamp64Micro(min(received_at))) / 1000"
_NUM_GAPS = "toFloat64(greatest(completion_tokens, 1) - 1)"
_MERGED = {
    **dict.fromkeys(
        (
            *("prompt_tokens", "cached_tokens", "completion_tokens", "proposed_tokens"),
            *("accepted_tokens", "pulled_tokens", "cost", "device_us", "device_cost"),
            *("num_preemptions", "num_tool_calls"),
        ),
        "sum({0})",
    ),
    # Values of the generation that ended last.
    **dict.fromkeys(
        ("model_served", "worker", "price_version", "trace_id", "kv_source", "api"),
        "argMaxIf({0}, done_at, {0} != '')",
    ),
    **dict.fromkeys(("received_at", "dispatched_at", "started_at", "first_token_at"), "min({0})"),
    **dict.fromkeys(
        (
            *("done_at", "epoch", "resampled", "stream", "max_tokens", "deadline_at"),
            "record_version",
        ),
        "max({0})",
    ),
    # All entries in the order of their attempts.
    **dict.fromkeys(("lives", "pulls"), "arraySort(groupArrayArray({0}))"),
    # In the order of the calls.
    "called_tools": "arraySlice(arrayFlatten(arrayMap(one -> one.2, "
    f"arraySort(groupArray(((attempt, choice, round), {{0}}))))), 1, {MAX_CALLED_TOOLS})",
    "queue_ms": _SINCE.format("min(started_at)"),
    "ttft_ms": _SINCE.format("min(first_token_at)"),
    "tpot_us": f"sum({{0}} * {_NUM_GAPS}) / nullIf(sumIf({_NUM_GAPS}, isNotNull({{0}})), 0)",
    "total_ms": _SINCE.format("max(done_at)"),
    "finish_reason": f"argMax({{0}}, (attempt, {_SEVERITY}, -toInt64(choice), round))",
    "status": f"argMax({{0}}, (attempt, {_SEVERITY}))",
    "error_code": f"argMax({{0}}, (attempt, {_SEVERITY}, -toUnixTimestamp64Micro(done_at)))",
    "energy_j": "if(count({0}) = count(started_at), sumOrNull({0}), NULL)",
    "currency": "argMax({0}, (price_version != '', done_at))",
    "num_devices": "argMax({0}, (worker != '', done_at))",
}
# Columns of the row of a request that is computed from its generations' rows, with their
# expressions. Its place in the outbox is the sum of theirs, which rises with each stored or
# replaced one.
MERGED_COLUMNS = {
    "request_id": "request_id",
    **{
        column.name: _MERGED.get(column.name, _FIRST).format(column.name)
        for column in (_BATCH_ID, *_COMMON)
    },
    "num_generations": "count()",
    "is_whole": "false",
    "outbox_sequence": "sum(outbox_sequence)",
}

DELIVERIES: Table[DeliveryRecord] = Table.of("deliveries", _columns(DeliveryRecord))
WORKER_SAMPLES: Table[WorkerSample] = Table.of("worker_samples", _columns(WorkerSample))
TRANSCRIPTS: Table[TranscriptRecord] = Table.of("transcripts", _columns(TranscriptRecord))
REFUSALS: Table[RefusalRecord] = Table.of(
    "refusals",
    _columns(
        RefusalRecord,
        Column("request_ids", "Array(String)", lambda r: list(r.request_ids)),
        names={"key_id": "api_key", "limit": "limit_reached", "count": "requests"},
    ),
)
WORKER_LOSSES: Table[WorkerLossRecord] = Table.of("worker_losses", _columns(WorkerLossRecord))

_TABLES: dict[type, Table[Any]] = {
    RequestRecord: REQUESTS,
    DeliveryRecord: DELIVERIES,
    WorkerSample: WORKER_SAMPLES,
    TranscriptRecord: TRANSCRIPTS,
    RefusalRecord: REFUSALS,
    WorkerLossRecord: WORKER_LOSSES,
}
_FIELDS = {kind: _Fields.of(kind) for kind in _TABLES}
# All tables of records.
TABLES: tuple[Table[Any], ...] = (REQUESTS, GENERATION_ROWS, *tuple(_TABLES.values())[1:])
