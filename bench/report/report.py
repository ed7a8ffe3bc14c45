"""Report of a run: the output of ``--json``, and the input of tables, pages and comparisons.

``schema`` names this layout and its version. Fields may be added to a version; a field that changes
its meaning makes a new version. All times are in the unit of their name's suffix; times ``at_s``
count from the start of the load, warm-up included.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from millrace.bench.health import ProcessHealth
from millrace.bench.settings import LoadSettings, Slo
from millrace.schemas.errors import ConfigError

SCHEMA = "millrace.bench/1"

# Distributions of a report, in display order.
METRICS = ("ttft", "itl", "gap", "tpot", "e2e", "client_delay")


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of ``count`` measurements in milliseconds. ``quantiles_ms`` are 101 quantiles,
    from the smallest value to the largest. ``histogram`` counts the values between neighbouring
    ``edges_ms``; the last edge leaves out the slowest half percent."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    quantiles_ms: tuple[float, ...]
    edges_ms: tuple[float, ...]
    histogram: tuple[float, ...]


class MeasuredRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests due in the measured time. Each succeeded, failed, or was unfinished when the run
    ended; ``num_warm_up`` were sent earlier and count nowhere."""

    num_sent: int
    num_succeeded: int
    num_failed: int
    num_unfinished: int
    num_warm_up: int


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the successful requests. ``counted_by`` is ``server`` (its usage), ``parts`` if it
    gave no usage and each part counts as a token, or ``mixed``. ``parts_counted_by`` is the source
    of the tokens of an answer's parts: ``server`` (reported in each part) or ``evenly`` (the
    answer's tokens divided by its parts). ``tokens_per_part`` is the mean."""

    num_prompt: int
    num_cached: int
    num_output: int
    counted_by: str
    parts_counted_by: str
    tokens_per_part: float


class MeasuredThroughput(msgspec.Struct, frozen=True, kw_only=True):
    """Rates over the measured time: requests by their successful end, output tokens of all requests
    by their arrival, prompt tokens by the start of the answer."""

    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met all of ``slo``, per second of the measured time; ``share`` is their part of
    all requests sent in it."""

    slo: Slo
    num_good: int
    requests_per_s: float
    share: float


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """Bin of the run from ``at_s`` on. ``in_flight`` is the mean."""

    at_s: float
    width_s: float
    tokens_per_s: float
    arrivals_per_s: float
    ends_per_s: float
    num_errors: int
    in_flight: float
    ttft_p50_ms: float | None


class ClientHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Health of the load processes. ``why_limited`` is empty unless they, and not the server, may
    have been the bottleneck."""

    processes: tuple[ProcessHealth, ...]
    why_limited: str


class RequestSample(msgspec.Struct, frozen=True, kw_only=True):
    """Sample of a request, with ``--samples``. Latencies are from ``due_s``."""

    index: int
    due_s: float
    client_delay_ms: float
    ttft_ms: float | None
    e2e_ms: float
    status: int
    error: str
    num_prompt_tokens: int
    num_output_tokens: int
    gaps_ms: tuple[float, ...]
    part_tokens: tuple[int, ...]


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report of a run. ``measured_s`` is the measured time after ``settings.warm_up_s``;
    ``latencies`` has the METRICS with measurements; ``errors`` counts by code."""

    schema: str
    started_at: str
    settings: LoadSettings
    interrupted: bool
    measured_s: float
    requests: MeasuredRequests
    errors: dict[str, int]
    tokens: Tokens
    throughput: MeasuredThroughput
    latencies: dict[str, Distribution]
    timeline: tuple[Bin, ...]
    client: ClientHealth
    goodput: Goodput | None = None
    samples: tuple[RequestSample, ...] = ()


class _Head(msgspec.Struct):
    schema: str = ""


def write_report(report: msgspec.Struct, path: Path) -> None:
    """Write a report as JSON. Raises ConfigError if the file cannot be written."""
    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def write_file(path: Path, content: bytes) -> None:
    """Write a file. Raises ConfigError if it cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def read_report(path: Path) -> LoadReport:
    """Read a report from its file. Raises ConfigError for anything else."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        schema = msgspec.json.decode(raw, type=_Head).schema
        if schema != SCHEMA:
            raise ConfigError(f"{path} is no {SCHEMA} report (schema: {schema!r})")
        return msgspec.json.decode(raw, type=LoadReport)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no report of millrace bench: {error}") from error
