"""Server of ``/metrics`` and ``/healthz`` of one process, for Prometheus and process supervisors.

It runs on the process's own event loop, so values do not change during a scrape. It is minimal: a
GET is answered and the connection is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

import msgspec
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from millrace.runtime.addresses import is_loopback
from millrace.runtime.faults.failures import Failures, note_in
from millrace.runtime.http.content_coding import encoded, weight_of
from millrace.runtime.http.head import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    Headers,
    HttpFault,
    head_fault,
    invalid,
    too_large,
)
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import MetricsConfig
from millrace.schemas.errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_MAX_CONNECTIONS = 64
_EXCHANGE_S = 10.0
_LINGER_S = 2.0

logger = logging.getLogger(__name__)


def new_registry() -> CollectorRegistry:
    """Make a registry with the metrics of every process: version, memory, CPU time, open files."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_Build())
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Return the registry in Prometheus' text format."""
    return generate_latest(registry)


def exposition(registry: CollectorRegistry, headers: Headers) -> tuple[bytes, dict[str, str]]:
    """Return the registry, and the response headers for a request with these ``headers``.

    The format is Prometheus' text format, or OpenMetrics if ``Accept`` names and prefers it: only
    OpenMetrics has exemplars. It is compressed as ``Accept-Encoding`` allows.
    """
    asked = weight_of(headers, b"accept", b"application/openmetrics-text")
    is_openmetrics = asked > 0 and asked >= weight_of(headers, b"accept", b"text/plain")
    if is_openmetrics:
        text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    else:
        text = render(registry)
    body, coding = encoded(text, headers)
    told = {
        "Content-Type": OPENMETRICS_TYPE if is_openmetrics else CONTENT_TYPE,
        "Vary": "Accept, Accept-Encoding",
    }
    return body, told | ({"Content-Encoding": coding} if coding else {})


class Monitor:
    """Monitor of one process.

    ``trouble`` returns why the process cannot work now, empty if it can. ``/healthz`` and the gauge
    ``millrace_healthy`` show that, and whether the process gave up after ``failures`` of its tasks.
    ``models``, if set, returns the catalogue's models that the process knows.
    """

    def __init__(
        self, part: str, registry: CollectorRegistry | None = None, token: str = ""
    ) -> None:
        """Create a monitor. ``token``: bearer token required for ``/metrics``, empty for none."""
        self.registry = registry or new_registry()
        self._token = token
        self.trouble: Callable[[], str] = lambda: "starting"
        self.models: Callable[[], Iterable[str]] | None = None
        self.url = ""
        self._part = part
        self._exchanges = Tasks()
        self.failures = Failures()
        self.registry.register(self.failures)
        self.registry.register(_Health(self))

    def answer(self, head: bytes) -> bytes:
        """Return the response to a request with this head."""
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            return _refusal(invalid("The request line is not valid HTTP."))
        headers = _headers(lines)
        if len(head) > MAX_HEAD_BYTES or len(headers) > MAX_FIELDS:
            return _refusal(too_large("Headers"))
        fault = head_fault(words[2][5:].decode("latin-1"), words[0].decode("latin-1"), headers)
        if fault is not None:
            return _refusal(fault)
        method, path = words[0], words[1].partition(b"?")[0]
        authorization = dict(reversed(headers)).get(b"authorization", b"").decode("latin-1")
        if path not in (b"/metrics", b"/healthz"):
            return _response(404, _TEXT, b"Not found. Use /metrics or /healthz.\n")
        if method not in (b"GET", b"HEAD"):
            return _response(405, _TEXT, b"Use GET.\n", {"Allow": "GET, HEAD"})
        if path == b"/healthz":
            response = self._health()
        elif self._token and not bears_token(authorization, self._token):
            response = _response(401, _TEXT, b"Send metrics.token as Authorization: Bearer.\n")
        else:
            try:
                body, told = exposition(self.registry, headers)
                response = _response(200, told.pop("Content-Type"), body, told)
            except Exception:
                # A bug in a collector must not end a process that serves.
                logger.exception("the metrics could not be collected")
                response = _response(500, _TEXT, b"The metrics could not be collected.\n")
        return response if method == b"GET" else response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    def why_unhealthy(self) -> str:
        """Return why the process does not work; empty while it does."""
        return self.failures.trouble or self.trouble()

    def _health(self) -> bytes:
        trouble = self.why_unhealthy()
        told: dict[str, object] = {"status": trouble or "ok", "part": self._part}
        if self.models is not None:
            told["models"] = list(self.models())
        body = msgspec.json.encode(told)
        return _response(503 if trouble else 200, _JSON, body)

    def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request on a new connection, in a task that ends with ``close``."""
        if len(self._exchanges) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._exchanges.spawn(self._exchange(reader, writer), "metrics")

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_EXCHANGE_S):
                try:
                    response = self.answer(await reader.readuntil(b"\r\n\r\n"))
                except asyncio.LimitOverrunError:
                    response = _refusal(too_large("Headers"))
                writer.write(response)
                writer.write_eof()
                await writer.drain()
                # Closing with unread data would reset the connection before the client has read the
                # answer.
                async with asyncio.timeout(_LINGER_S):
                    while await reader.read(MAX_HEAD_BYTES):
                        pass
        except (TimeoutError, EOFError, OSError) as error:
            logger.debug("a scrape was aborted", extra={"why": type(error).__name__})
        finally:
            writer.close()

    async def close(self) -> None:
        """Abort pending answers."""
        await self._exchanges.close()


def bears_token(authorization: str, token: str) -> bool:
    """Return whether an ``Authorization`` header has this bearer token, in constant time."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode(), token.encode()
    )


def check_exposure(config: MetricsConfig) -> None:
    """Raise ConfigError if other machines can reach the metrics without a token or permission."""
    if not (is_loopback(config.host) or config.token or config.public):
        raise ConfigError(
            f"metrics.host is {config.host}, which other machines can reach: set metrics.token "
            "(MILLRACE_METRICS__TOKEN, or _TOKEN_FILE), which Prometheus then sends, or "
            "metrics.public to true if every client that reaches it may read the metrics"
        )


def _headers(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    fields = (line.partition(b":") for line in lines if line)
    return [(name.strip().lower(), value.strip()) for name, _, value in fields]


@asynccontextmanager
async def monitored(
    part: str, config: MetricsConfig, registry: CollectorRegistry | None = None
) -> AsyncIterator[Monitor]:
    """Run a monitor that records failures of tasks started in the context.

    It serves on ``config.host:config.port`` as long as the context lasts. Port 0 serves nowhere.
    Raises ConfigError if it cannot listen there, or must not (``check_exposure``).
    """
    monitor = Monitor(part, registry, config.token)
    note_in(monitor.failures)
    if not config.port:
        yield monitor
        return
    check_exposure(config)
    listener = _listen(config)
    server = await asyncio.start_server(monitor.on_connection, sock=listener, limit=MAX_HEAD_BYTES)
    host = f"[{config.host}]" if ":" in config.host else config.host
    monitor.url = f"http://{host}:{config.port}/metrics"
    logger.info("serving metrics", extra={"url": monitor.url})
    try:
        yield monitor
    finally:
        server.close()
        await monitor.close()


def _listen(config: MetricsConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(_MAX_CONNECTIONS)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        why = (error.strerror or error) if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot serve metrics on {config.host}:{config.port} ({why}); set metrics.host and "
            "metrics.port to a free address, or metrics.port to 0 for none"
        ) from error
    return listener


def _response(
    status: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None
) -> bytes:
    challenge = ['WWW-Authenticate: Bearer realm="millrace metrics"'] if status == 401 else []
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        *challenge,
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body


def _refusal(fault: HttpFault) -> bytes:
    return _response(fault.status, _TEXT, f"{fault.message}\n".encode())


def build_version() -> str:
    """Return the version of Millrace."""
    try:
        return version("millrace")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout without an installation


class _Build(Collector):
    """Metric of Millrace's version."""

    def collect(self) -> Iterator[Metric]:
        info = InfoMetricFamily("millrace_build", "Version of the process")
        info.add_metric([], {"version": build_version()})
        yield info


class _Health(Collector):
    """Gauge of the state in ``/healthz``."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "millrace_healthy", "1 while the process can do its work, as in /healthz"
        )
        healthy.add_metric([], 0 if self._monitor.why_unhealthy() else 1)
        yield healthy
