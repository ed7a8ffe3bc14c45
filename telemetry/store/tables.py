"""Records as columns of their tables, checked on the way.

A field becomes the column that ``_column`` derives of its name and type. What differs is declared
below: the type, the value, and how the row of a request with several generations is made.
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
# Not in the tuples of lives: a sink of the version before, which writes those, goes on meanwhile.
_PULLS = "Array(Tuple(epoch UInt32, kv_source String, pulled_tokens UInt32))"
_MAX_MEASURE = 1e300
_COST_STEP = Decimal("0.000000000001")
# With the column's 12 digits behind the point, as many as a Decimal is rounded to.
_MAX_COST = Decimal(10) ** 15
# Of UInt64, microseconds and bytes, what JSON's numbers hold exactly.
_MAX_COUNTS = {"UInt16": (1 << 16) - 1, "UInt32": (1 << 32) - 1, "UInt64": 1 << 53}


class Column(msgspec.Struct, frozen=True):
    """A column: its name, its ClickHouse type, its value in a record, and the fields that the value
    is made of; none: the field of the column's name."""

    name: str
    type: str
    value: Callable[[Any], Any]
    made_of: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return self.made_of or (self.name,)


class Table(PlainTable, Generic[R], frozen=True):
    """A table and how records become its columns; the place in the outbox is its last column."""

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
        """One list for each column. The records have passed ``check``."""
        columns = [[column.value(record) for record in records] for column in self.columns]
        columns.append(list(sequences))
        return columns


def table_of(record: Record) -> Table[Any]:
    """Where a record belongs."""
    if isinstance(record, RequestRecord) and record.parent_id:
        return GENERATION_ROWS
    return _TABLES[type(record)]


def check(record: Record) -> None:
    """Raises MalformedMessageError, naming the field, for a value that its column cannot hold."""
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
    """The fields of a kind of record that a column might not hold, by what they are."""

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
# Text of which most rows have one of their own.
_TEXTS = (
    *("batch_id", "completion", "parent_id", "prompt"),
    *("request_id", "session_id", "trace_id", "user"),
)
# Fields that become NULL unless the record has a value in the field beside it.
_NULL_UNLESS = {
    **{name: name for name in ("first_byte_ms", "longest_gap_ms", "intake_ms", "num_blocks")},
    **{name: name for name in ("dispatched_ns", "started_ns", "first_token_ns", "deadline_ns")},
    "queue_ms": "started_ns",
    "ttft_ms": "first_token_ns",
    "stream": "api",
    "num_free_blocks": "num_blocks",
    "step_ms_mean": "num_steps",
    # Of a CPU there is no driver to ask.
    "device_share": "device_memory_total_bytes",
    "device_memory_bytes": "device_memory_total_bytes",
    "device_memory_total_bytes": "device_memory_total_bytes",
}


def _column(field: str, kind: Any, name: str = "") -> Column:
    """The column that a field of this type becomes."""
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
    """The columns of a kind of record: the ``special`` ones, and of the other fields that are not
    ``left_out`` the derived ones, under these ``names`` if they are given."""
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
    """Of each attempt that pulled anything, that which ended the request included."""
    pulls = [
        (attempt.epoch, attempt.kv_source, attempt.pulled_tokens)
        for attempt in record.attempts
        if attempt.pulled_tokens
    ]
    num_own_tokens = record.pulled_tokens - sum(num_tokens for _, _, num_tokens in pulls)
    if num_own_tokens > 0:
        pulls.append((record.epoch, record.kv_source, num_own_tokens))
    return pulls


# Of requests that may have several generations; the others are in REQUESTS alone.
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

# How the row of a request that has several generations is made of theirs, by column; {0} stands for
# the column. The others are those of the first generation.
_FIRST = "argMin({0}, (attempt, choice, round))"
# The last attempt at a line of a batch decides how the request ended, the worst of its generations
# first; why it failed is what failed first.
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
    # That of the generation which ended last.
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
    # Of all in the order of their attempts.
    **dict.fromkeys(("lives", "pulls"), "arraySort(groupArrayArray({0}))"),
    # In the order in which they were made.
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
# The columns of the row of a request that is made of its generations' rows, and what each is. Its
# place in the outbox is the sum of theirs, which rises with every one that is stored or replaced.
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
# All that records become rows of.
TABLES: tuple[Table[Any], ...] = (REQUESTS, GENERATION_ROWS, *tuple(_TABLES.values())[1:])
