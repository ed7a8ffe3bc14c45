"""Records as columns of their tables, checked on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
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
_MONEY = "Decimal(38, 12)"
_LIVES = (
    f"Array(Tuple(epoch UInt32, worker String, started_at Nullable({_TIME}), "
    f"ended_at Nullable({_TIME}), device_us UInt64))"
)
# Not in the tuples of lives: a sink of the version before, which writes those, goes on meanwhile.
_PULLS = "Array(Tuple(epoch UInt32, kv_source String, pulled_tokens UInt32))"
_MAX_UINT16 = (1 << 16) - 1
_MAX_UINT32 = (1 << 32) - 1
# Microseconds and bytes: what JSON's numbers hold exactly.
_MAX_WIDE = 1 << 53
_MAX_MEASURE = 1e300
_COST_STEP = Decimal("0.000000000001")
# With the column's 12 digits behind the point, as many as a Decimal is rounded to.
_MAX_COST = Decimal(10) ** 15


# How the row of a request that has several generations is made of theirs: their sum; that of the
# first one; that which ended last; of all in the order of their attempts.
_SUM = "sum({0})"
_FIRST = "argMin({0}, (attempt, choice, round))"
_ANY_LAST = "argMaxIf({0}, done_at, {0} != '')"
_SORTED = "arraySort(groupArrayArray({0}))"
# In the order in which they were made.
_CALLS = (
    "arraySlice(arrayFlatten(arrayMap(one -> one.2, "
    f"arraySort(groupArray(((attempt, choice, round), {{0}}))))), 1, {MAX_CALLED_TOOLS})"
)
# The last attempt at a line of a batch decides how the request ended, the worst of its generations
# first; why it failed is what failed first.
_SEVERITY = "indexOf(['done', 'cancelled', 'shed', 'expired', 'failed'], status)"
_SINCE = "(toUnixTimestamp64Micro({0}) - toUnixTimestamp64Micro(min(received_at))) / 1000"
_NUM_GAPS = "toFloat64(greatest(completion_tokens, 1) - 1)"


class Column(msgspec.Struct, Generic[R], frozen=True):
    """A column: its name, its ClickHouse type, and its value in a record. ``merged`` is the value
    for a request of several generations, of theirs, in which {0} stands for the column."""

    name: str
    type: str
    value: Callable[[R], Any]
    merged: str = _FIRST


class Table(msgspec.Struct, Generic[R], frozen=True):
    """A table and how records become its columns; the place in the outbox is its last column."""

    name: str
    columns: tuple[Column[R], ...]

    @property
    def column_names(self) -> tuple[str, ...]:
        return (*(column.name for column in self.columns), "outbox_sequence")

    @property
    def column_types(self) -> tuple[str, ...]:
        return (*(column.type for column in self.columns), "UInt64")

    def to_columns(self, records: Sequence[R], sequences: Sequence[int]) -> list[list[Any]]:
        """One list for each column. The records have passed ``check``."""
        columns = [[column.value(record) for record in records] for column in self.columns]
        columns.append(list(sequences))
        return columns


def table_of(record: Record) -> Table[Any]:
    """Where a record belongs."""
    match record:
        case RequestRecord():
            return GENERATION_ROWS if record.parent_id else REQUESTS
        case DeliveryRecord():
            return DELIVERIES
        case WorkerSample():
            return WORKER_SAMPLES
        case TranscriptRecord():
            return TRANSCRIPTS
        case RefusalRecord():
            return REFUSALS
        case WorkerLossRecord():
            return WORKER_LOSSES


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
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        return cls(
            counts=tuple(
                (name, _limit(name)) for name in types if types[name] in (int, int | None)
            ),
            measures=tuple(name for name in types if types[name] in (float, float | None)),
            amounts=tuple(name for name in types if types[name] is Decimal),
        )


def _limit(name: str) -> int:
    if name.endswith("_ns"):
        return MAX_RECORD_TIME_NS
    if name.endswith(("_us", "_bytes")):
        return _MAX_WIDE
    return _MAX_UINT16 if name in ("version", "status") else _MAX_UINT32


_FIELDS = {
    kind: _Fields.of(kind)
    for kind in (
        RequestRecord,
        DeliveryRecord,
        WorkerSample,
        TranscriptRecord,
        RefusalRecord,
        WorkerLossRecord,
    )
}
_ATTEMPT_COUNTS = _Fields.of(Attempt).counts


def _micros(name: str) -> Callable[[Any], int]:
    return lambda record: getattr(record, name) // 1000


def _micros_if_reached(name: str) -> Callable[[Any], int | None]:
    return lambda record: getattr(record, name) // 1000 or None


def _from_driver(name: str) -> Callable[[WorkerSample], float | None]:
    """A figure of the device; None where there is no driver to ask, as on a CPU."""
    return lambda sample: getattr(sample, name) if sample.device_memory_total_bytes else None


def _amount(name: str) -> Callable[[Any], Decimal]:
    return lambda record: getattr(record, name).quantize(_COST_STEP)


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


REQUESTS: Table[RequestRecord] = Table(
    "requests",
    (
        Column("request_id", "String", lambda r: r.request_id),
        Column("tenant", _STRING, lambda r: r.tenant),
        Column("key_id", _STRING, lambda r: r.key_id),
        Column("user", "String", lambda r: r.user),
        Column("session", "String", lambda r: r.session_id),
        Column("metadata", "Map(LowCardinality(String), String)", lambda r: r.metadata),
        Column("source", _STRING, lambda r: r.source.value),
        Column("tier", _STRING, lambda r: r.tier.value),
        Column("model_requested", _STRING, lambda r: r.model_requested),
        Column("model_served", _STRING, lambda r: r.model_served, _ANY_LAST),
        Column("route_reason", _STRING, lambda r: r.route_reason),
        Column("worker", _STRING, lambda r: r.worker_id, _ANY_LAST),
        Column("adapter", _STRING, lambda r: r.adapter),
        Column("prompt_tokens", "UInt32", lambda r: r.prompt_tokens, _SUM),
        Column("cached_tokens", "UInt32", lambda r: r.cached_tokens, _SUM),
        Column("completion_tokens", "UInt32", lambda r: r.completion_tokens, _SUM),
        Column(
            "queue_ms",
            "Nullable(Float64)",
            lambda r: r.queue_ms if r.started_ns else None,
            _SINCE.format("min(started_at)"),
        ),
        Column(
            "ttft_ms",
            "Nullable(Float64)",
            lambda r: r.ttft_ms if r.first_token_ns else None,
            _SINCE.format("min(first_token_at)"),
        ),
        Column(
            "tpot_us",
            "Nullable(Float64)",
            lambda r: r.tpot_us if r.completion_tokens > 1 else None,
            f"sum({{0}} * {_NUM_GAPS}) / nullIf(sumIf({_NUM_GAPS}, isNotNull({{0}})), 0)",
        ),
        Column("total_ms", "Float64", lambda r: r.total_ms, _SINCE.format("max(done_at)")),
        Column(
            "finish_reason",
            _STRING,
            lambda r: r.finish_reason,
            f"argMax({{0}}, (attempt, {_SEVERITY}, -toInt64(choice), round))",
        ),
        Column(
            "status", _STRING, lambda r: r.status.value, f"argMax({{0}}, (attempt, {_SEVERITY}))"
        ),
        Column(
            "error_code",
            _STRING,
            lambda r: r.error_code,
            f"argMax({{0}}, (attempt, {_SEVERITY}, -toUnixTimestamp64Micro(done_at)))",
        ),
        Column("cost", _MONEY, _amount("cost"), _SUM),
        Column("device_us", "UInt64", lambda r: r.device_us, _SUM),
        Column("device_cost", _MONEY, _amount("device_cost"), _SUM),
        Column(
            "energy_j",
            "Nullable(Float64)",
            lambda r: r.energy_j,
            "if(count({0}) = count(started_at), sumOrNull({0}), NULL)",
        ),
        Column(
            "currency", _STRING, lambda r: r.currency, "argMax({0}, (price_version != '', done_at))"
        ),
        Column("price_version", _STRING, lambda r: r.price_version, _ANY_LAST),
        Column("received_at", _TIME, _micros("received_ns"), "min({0})"),
        Column(
            "dispatched_at", f"Nullable({_TIME})", _micros_if_reached("dispatched_ns"), "min({0})"
        ),
        Column("started_at", f"Nullable({_TIME})", _micros_if_reached("started_ns"), "min({0})"),
        Column(
            "first_token_at", f"Nullable({_TIME})", _micros_if_reached("first_token_ns"), "min({0})"
        ),
        Column("done_at", _TIME, _micros("done_ns"), "max({0})"),
        Column("epoch", "UInt32", lambda r: r.epoch, "max({0})"),
        Column("lives", _LIVES, _lives, _SORTED),
        Column("trace_id", "String", lambda r: r.trace_id, _ANY_LAST),
        Column("cost_method", _STRING, lambda r: r.cost_method.value),
        Column("resampled", "Bool", lambda r: r.resampled, "max({0})"),
        Column("proposed_tokens", "UInt32", lambda r: r.proposed_tokens, _SUM),
        Column("accepted_tokens", "UInt32", lambda r: r.accepted_tokens, _SUM),
        Column("pulled_tokens", "UInt32", lambda r: r.pulled_tokens, _SUM),
        Column("kv_source", _STRING, lambda r: r.kv_source, _ANY_LAST),
        Column("pulls", _PULLS, _pulls, _SORTED),
        Column(
            "num_devices", "UInt32", lambda r: r.num_devices, "argMax({0}, (worker != '', done_at))"
        ),
        Column("num_preemptions", "UInt32", lambda r: r.num_preemptions, _SUM),
        Column("api", _STRING, lambda r: r.api.value, _ANY_LAST),
        Column("stream", "Nullable(Bool)", lambda r: r.stream if r.api else None, "max({0})"),
        Column("max_tokens", "Nullable(UInt32)", lambda r: r.max_tokens, "max({0})"),
        Column("deadline_at", f"Nullable({_TIME})", _micros_if_reached("deadline_ns"), "max({0})"),
        Column(
            "called_tools",
            "Array(LowCardinality(String))",
            lambda r: list(r.called_tools),
            _CALLS,
        ),
        Column("num_tool_calls", "UInt32", lambda r: r.num_tool_calls, _SUM),
        Column("record_version", "UInt16", lambda r: r.version, "max({0})"),
    ),
)

# Of requests that may have several generations; the others are in REQUESTS alone.
_PART_COLUMNS: tuple[Column[RequestRecord], ...] = (
    Column("generation_id", "String", lambda r: r.request_id),
    Column("choice", "UInt32", lambda r: r.choice),
    Column("round", "UInt32", lambda r: r.round),
    Column("attempt", "UInt32", lambda r: r.attempt),
)
_BATCH_ID: Column[RequestRecord] = Column("batch_id", "String", lambda r: r.batch_id)
GENERATION_ROWS: Table[RequestRecord] = Table(
    "generation_rows",
    (
        Column("request_id", "String", lambda r: r.parent_id),
        *_PART_COLUMNS,
        _BATCH_ID,
        *REQUESTS.columns[1:],
    ),
)
# The columns of the row of a request that is made of its generations' rows, and what each is. Its
# place in the outbox is the sum of theirs, which rises with every one that is stored or replaced.
MERGED_COLUMNS = {
    "request_id": "request_id",
    **{
        column.name: column.merged.format(column.name)
        for column in (_BATCH_ID, *REQUESTS.columns[1:])
    },
    "num_generations": "count()",
    "is_whole": "false",
    "outbox_sequence": "sum(outbox_sequence)",
}

DELIVERIES: Table[DeliveryRecord] = Table(
    "deliveries",
    (
        Column("request_id", "String", lambda r: r.request_id),
        Column("gateway", _STRING, lambda r: r.gateway_id),
        Column("tenant", _STRING, lambda r: r.tenant),
        Column("source", _STRING, lambda r: r.source.value),
        Column("model", _STRING, lambda r: r.model),
        Column("first_byte_ms", "Nullable(Float64)", lambda r: r.first_byte_ms or None),
        Column("total_ms", "Float64", lambda r: r.total_ms),
        Column("tokens_delivered", "UInt32", lambda r: r.tokens_delivered),
        Column("num_replays", "UInt32", lambda r: r.num_replays),
        Column("num_epochs", "UInt32", lambda r: r.num_epochs),
        Column("num_resumes", "UInt32", lambda r: r.num_resumes),
        Column("num_stalls", "UInt32", lambda r: r.num_stalls),
        Column("stalled_ms", "Float64", lambda r: r.stalled_ms),
        Column("longest_gap_ms", "Nullable(Float64)", lambda r: r.longest_gap_ms or None),
        Column("intake_ms", "Nullable(Float64)", lambda r: r.intake_ms or None),
        Column("outcome", _STRING, lambda r: r.outcome),
        Column("done_at", _TIME, _micros("done_ns")),
        Column("record_version", "UInt16", lambda r: r.version),
    ),
)

WORKER_SAMPLES: Table[WorkerSample] = Table(
    "worker_samples",
    (
        Column("worker", _STRING, lambda r: r.worker_id),
        Column("name", _STRING, lambda r: r.name),
        Column("model", _STRING, lambda r: r.model),
        Column("sampled_at", _TIME, _micros("sampled_ns")),
        Column("period_ms", "Float64", lambda r: r.period_ms),
        Column("num_running", "UInt32", lambda r: r.num_running),
        Column("num_waiting", "UInt32", lambda r: r.num_waiting),
        Column("num_blocks", "Nullable(UInt32)", lambda r: r.num_blocks or None),
        Column(
            "num_free_blocks",
            "Nullable(UInt32)",
            lambda r: r.num_free_blocks if r.num_blocks else None,
        ),
        Column("num_steps", "UInt32", lambda r: r.num_steps),
        Column(
            "step_ms_mean", "Nullable(Float64)", lambda r: r.step_ms_mean if r.num_steps else None
        ),
        Column("busy_share", "Float64", lambda r: r.busy_share),
        Column("busy_us", "UInt64", lambda r: r.busy_us),
        Column("charged_us", "UInt64", lambda r: r.charged_us),
        Column("energy_j", "Nullable(Float64)", lambda r: r.energy_j),
        Column("charged_j", "Nullable(Float64)", lambda r: r.charged_j),
        Column("prefill_tokens", "UInt32", lambda r: r.prefill_tokens),
        Column("decode_tokens", "UInt32", lambda r: r.decode_tokens),
        Column("num_preemptions", "UInt32", lambda r: r.num_preemptions),
        Column("queue_depth", "UInt32", lambda r: r.queue_depth),
        Column("prefix_query_tokens", "UInt32", lambda r: r.prefix_query_tokens),
        Column("prefix_hit_tokens", "UInt32", lambda r: r.prefix_hit_tokens),
        Column("role", _STRING, lambda r: r.role.value),
        Column("pulled_tokens", "UInt32", lambda r: r.pulled_tokens),
        Column("served_tokens", "UInt32", lambda r: r.served_tokens),
        Column("num_devices", "UInt32", lambda r: r.num_devices),
        Column("device_name", _STRING, lambda r: r.device_name),
        Column("device_share", "Nullable(Float64)", _from_driver("device_share")),
        Column("device_memory_bytes", "Nullable(UInt64)", _from_driver("device_memory_bytes")),
        Column(
            "device_memory_total_bytes",
            "Nullable(UInt64)",
            _from_driver("device_memory_total_bytes"),
        ),
        Column("device_per_hour", _MONEY, _amount("device_per_hour")),
        Column("currency", _STRING, lambda r: r.currency),
        Column("record_version", "UInt16", lambda r: r.version),
    ),
)

TRANSCRIPTS: Table[TranscriptRecord] = Table(
    "transcripts",
    (
        Column("request_id", "String", lambda r: r.request_id),
        Column("tenant", _STRING, lambda r: r.tenant),
        Column("model", _STRING, lambda r: r.model),
        Column("prompt", "String", lambda r: r.prompt),
        Column("completion", "String", lambda r: r.completion),
        Column("done_at", _TIME, _micros("done_ns")),
        Column("record_version", "UInt16", lambda r: r.version),
    ),
)

REFUSALS: Table[RefusalRecord] = Table(
    "refusals",
    (
        Column("recorded_at", _TIME, _micros("recorded_ns")),
        Column("gateway", _STRING, lambda r: r.gateway_id),
        Column("number", "UInt32", lambda r: r.number),
        Column("tenant", _STRING, lambda r: r.tenant),
        Column("api_key", _STRING, lambda r: r.key_id),
        Column("door", _STRING, lambda r: r.door),
        Column("status", "UInt16", lambda r: r.status),
        Column("code", _STRING, lambda r: r.code),
        Column("limit_reached", _STRING, lambda r: r.limit),
        Column("requests", "UInt32", lambda r: r.count),
        Column("first_at", _TIME, _micros("first_ns")),
        Column("last_at", _TIME, _micros("last_ns")),
        Column("request_id", "String", lambda r: r.request_id),
        Column("request_ids", "Array(String)", lambda r: list(r.request_ids)),
        Column("record_version", "UInt16", lambda r: r.version),
    ),
)

WORKER_LOSSES: Table[WorkerLossRecord] = Table(
    "worker_losses",
    (
        Column("worker", _STRING, lambda r: r.worker_id),
        Column("name", _STRING, lambda r: r.name),
        Column("model", _STRING, lambda r: r.model),
        Column("lost_at", _TIME, _micros("lost_ns")),
        Column("cause", _STRING, lambda r: r.cause.value),
        Column("detail", _STRING, lambda r: r.detail),
        Column("observer", _STRING, lambda r: r.observer.value),
        Column("num_requests", "UInt32", lambda r: r.num_requests),
        Column("record_version", "UInt16", lambda r: r.version),
    ),
)

# All that records become rows of.
TABLES: tuple[Table[Any], ...] = (
    REQUESTS,
    GENERATION_ROWS,
    DELIVERIES,
    WORKER_SAMPLES,
    TRANSCRIPTS,
    REFUSALS,
    WORKER_LOSSES,
)
