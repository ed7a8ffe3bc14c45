"""HTTP server of /metrics and /healthz, on real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.runtime.histogram import DURATION_S, FIRST_TOKEN_S, PER_TOKEN_S, STEP_S, Histogram
from millrace.runtime.metrics_server import (
    CONTENT_TYPE,
    OPENMETRICS_TYPE,
    check_exposure,
    exposition,
    monitored,
)
from millrace.schemas.config import MetricsConfig
from millrace.schemas.errors import ConfigError
from tests.support.scraped import Scraped, exemplars, scrape_of
from tests.support.servers import free_port

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


@pytest.fixture
def config() -> MetricsConfig:
    return MetricsConfig(port=free_port())


def _base(config: MetricsConfig) -> str:
    return f"http://{config.host}:{config.port}"


async def _raw(config: MetricsConfig, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(config.host, config.port)
    writer.write(request)
    async with asyncio.timeout(5.0):
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_process_tells_its_part_and_its_health(config: MetricsConfig) -> None:
    async with monitored("scheduler", config) as monitor, httpx.AsyncClient() as http:
        assert monitor.url == f"{_base(config)}/metrics"
        starting = await http.get(f"{_base(config)}/healthz")
        assert (starting.status_code, starting.json()) == (
            503,
            {"status": "starting", "part": "scheduler"},
        )
        monitor.trouble = lambda: ""
        well = await http.get(f"{_base(config)}/healthz")
        assert (well.status_code, well.json()["status"]) == (200, "ok")
        answer = await http.get(f"{_base(config)}/metrics?name=ignored")
        assert answer.headers["content-type"] == CONTENT_TYPE
        scraped = Scraped(answer.text)
        scraped.check()
        assert scraped.value("millrace_healthy") == 1
        assert "millrace_build_info" in scraped.sample_names
        assert scraped.value("process_resident_memory_bytes") > 1e6
        monitor.trouble = lambda: "the message bus is unreachable"
        assert (await http.get(f"{_base(config)}/healthz")).status_code == 503
        again = Scraped((await http.get(f"{_base(config)}/metrics")).text)
        assert again.value("millrace_healthy") == 0


_PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (_PROMETHEUS, OPENMETRICS_TYPE),
        ("application/openmetrics-text", OPENMETRICS_TYPE),
        ("Application/OpenMetrics-Text; q=0.5", OPENMETRICS_TYPE),
        ("text/plain, application/openmetrics-text;q=0.9", CONTENT_TYPE),
        ("application/openmetrics-text;q=0", CONTENT_TYPE),
        ("application/openmetrics-text;q=nan", CONTENT_TYPE),
        ("text/html, */*", CONTENT_TYPE),
    ],
)
async def test_openmetrics_is_told_to_clients_that_ask_for_it(
    accept: str, content_type: str, config: MetricsConfig
) -> None:
    async with monitored("worker", config), httpx.AsyncClient() as http:
        answer = await http.get(f"{_base(config)}/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == content_type
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    assert answer.text.endswith("# EOF\n") == (content_type == OPENMETRICS_TYPE)
    if content_type == OPENMETRICS_TYPE:
        assert exemplars(answer.text) == {}


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("zstd", "zstd"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip;q=1.0, zstd;q=0.5", "gzip"),
        ("*", "zstd"),
        ("zstd;q=0, *", "gzip"),
        ("GZIP ; q=0.1", "gzip"),
        ("identity", ""),
        ("gzip;q=0", ""),
        ("br", ""),
        ("", ""),
    ],
)
async def test_metrics_are_compressed_as_the_client_accepts(
    accepted: str, coding: str, config: MetricsConfig
) -> None:
    headers = f"Host: a\r\nAccept-Encoding: {accepted}\r\n\r\n".encode()
    async with monitored("worker", config):
        answer = await _raw(config, b"GET /metrics HTTP/1.1\r\n" + headers)
        of_head = await _raw(config, b"HEAD /metrics HTTP/1.1\r\n" + headers)
    head, _, body = answer.partition(b"\r\n\r\n")
    told = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    assert told.get("Content-Encoding", "") == coding
    assert told["Content-Length"] == str(len(body))
    assert of_head.endswith(b"\r\n\r\n")
    assert (b"Content-Encoding" in of_head) == bool(coding)
    decoders: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.decompress,
        "zstd": zstd.decompress,
        "": bytes,
    }
    Scraped(decoders[coding](body).decode()).check()


async def test_what_is_no_scrape_is_refused(config: MetricsConfig) -> None:
    async with monitored("worker", config), httpx.AsyncClient(base_url=_base(config)) as http:
        assert (await http.get("/")).status_code == 404
        refused = await http.post("/metrics")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        head = await http.head("/metrics")
        assert (head.status_code, head.content) == (200, b"")
        assert (await _raw(config, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await http.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("status", "request_line", "rest"),
    [
        (431, b"GET /metrics HTTP/1.1", b"Host: a\r\nX: " + b"x" * 2_000_000),
        (431, b"GET /metrics HTTP/1.1", b"Host: a\r\n" + b"X: y\r\n" * 128 + b"\r\n"),
        (400, b"GET /metrics HTTP/1.1", b"\r\n"),
        (400, b"GET /metrics HTTP/1.1", b"Host: a\r\nHost: a\r\n\r\n"),
        (501, b"POST /metrics HTTP/1.1", b"Host: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"),
        (505, b"PRI * HTTP/2.0", b"\r\nSM\r\n\r\n"),
        (200, b"GET /metrics HTTP/1.0", b"\r\n"),
        (405, b"BREW /metrics HTTP/1.1", b"Host: a\r\n\r\n" + b"x" * 2_000_000),
    ],
)
async def test_a_head_has_the_bounds_of_every_port(
    config: MetricsConfig, status: int, request_line: bytes, rest: bytes
) -> None:
    async with monitored("worker", config):
        answer = await _raw(config, request_line + b"\r\n" + rest)
    assert answer.startswith(b"HTTP/1.1 %d " % status)


async def test_a_collector_that_fails_ends_nothing(config: MetricsConfig) -> None:
    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            raise ValueError

    async with monitored("worker", config) as monitor, httpx.AsyncClient() as http:
        broken = Broken()
        broken.describe = list  # type: ignore[attr-defined]  # it is asked for nothing so far
        monitor.registry.register(broken)
        assert (await http.get(f"{_base(config)}/metrics")).status_code == 500
        monitor.registry.unregister(broken)
        assert (await http.get(f"{_base(config)}/metrics")).status_code == 200


async def test_a_port_that_is_taken_is_said_with_what_to_do(config: MetricsConfig) -> None:
    async with monitored("worker", config):
        with pytest.raises(ConfigError, match=rf"{config.host}:{config.port}.*metrics\.port"):
            async with monitored("scheduler", config):
                pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "part.example"])
async def test_metrics_that_others_can_reach_need_a_token_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"set metrics\.token .* or metrics\.public to true"):
        async with monitored("worker", MetricsConfig(host=host, port=free_port())):
            pass
    check_exposure(MetricsConfig(host=host, token="secret"))
    check_exposure(MetricsConfig(host=host, public=True))
    check_exposure(MetricsConfig(host="::1"))


async def test_a_token_is_demanded_for_metrics_and_not_for_health(config: MetricsConfig) -> None:
    guarded = MetricsConfig(host="0.0.0.0", port=config.port, token="a-secret")
    async with monitored("worker", guarded), httpx.AsyncClient(base_url=_base(config)) as http:
        for wrong in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic a-secret"}):
            refused = await http.get("/metrics", headers=wrong)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith("Bearer")
            assert "millrace_" not in refused.text
        for scheme in ("Bearer", "bearer"):
            shown = await http.get("/metrics", headers={"Authorization": f"{scheme} a-secret"})
            assert shown.status_code == 200
            assert "millrace_build_info" in shown.text
        assert (await http.get("/healthz")).status_code == 503
    opened = MetricsConfig(host="0.0.0.0", port=config.port, public=True)
    async with monitored("worker", opened), httpx.AsyncClient(base_url=_base(config)) as http:
        assert (await http.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [MetricsConfig(port=70_000), MetricsConfig(host="nowhere.invalid", port=9, public=True)],
)
async def test_an_address_that_cannot_be_is_a_configuration_error(wrong: MetricsConfig) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve metrics on"):
        async with monitored("worker", wrong):
            pass


async def test_the_port_is_free_again_at_the_end(config: MetricsConfig) -> None:
    async with monitored("worker", config):
        hanging = await asyncio.open_connection(config.host, config.port)
    assert await asyncio.wait_for(hanging[0].read(), 5.0) == b""
    hanging[1].close()
    async with monitored("worker", config) as monitor, httpx.AsyncClient() as http:
        assert json.loads((await http.get(f"{_base(config)}/healthz")).content)["part"] == "worker"
        assert monitor.url


async def test_without_a_port_nothing_listens() -> None:
    async with monitored("worker", MetricsConfig()) as monitor:
        assert monitor.url == ""
        assert b"millrace_build_info" in monitor.answer(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")


def test_a_tally_is_a_histogram_of_prometheus() -> None:
    tally = Histogram((0.1, 1.0))
    tally.add(0.05, trace_id="ab")
    tally.add(0.1, 2, trace_id="cd")
    tally.add(7.0)

    class One(Collector):
        def collect(self) -> Iterator[Metric]:
            family = HistogramMetricFamily("millrace_x", "X", labels=["model"])
            tally.add_to(family, ["m"])
            yield family

    registry = CollectorRegistry()
    registry.register(One())
    body, _ = exposition(registry, [(b"accept", b"application/openmetrics-text")])
    assert exemplars(body.decode()) == {"millrace_x_bucket": {"cd"}}
    scraped = scrape_of(One())
    found = {
        bound: scraped.value("millrace_x_bucket", model="m", le=bound)
        for bound in ("0.1", "1.0", "+Inf")
    }
    assert found == {"0.1": 3, "1.0": 3, "+Inf": 4}
    assert scraped.value("millrace_x_sum", model="m") == pytest.approx(7.25)


@pytest.mark.parametrize("bounds", [FIRST_TOKEN_S, PER_TOKEN_S, DURATION_S, STEP_S])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
