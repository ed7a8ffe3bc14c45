"""``POST /v1/embeddings`` with OpenAI's own client, and what only bare requests can show."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest

from millrace.bus.tenancy.accounts import Account, AccountUsage, Demand
from millrace.bus.tenancy.errors import LimitsUnreachableError
from millrace.bus.tenancy.keeper import Granted
from millrace.gateway.api.pooled.pooled import MAX_JOBS_AT_ONCE
from millrace.gateway.rendering.embedding_vectors import VectorForm
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.tenancy.limits import Limiter
from millrace.schemas.config import GatewayConfig
from millrace.schemas.embeddings import MAX_INPUTS
from millrace.schemas.frames import Expired, Failed, Frame, Shed, Usage
from millrace.schemas.jobs import Source
from millrace.schemas.pooling import Pooling
from millrace.schemas.tenants import LimitSet
from tests.support.echo_worker import EMBEDDING_SIZE
from tests.support.running_gateway import (
    CONTEXT_WINDOW_TOKENS,
    MODEL,
    RunningGateway,
    running_gateway,
)
from tests.support.waiting import eventually

_PATH = "/v1/embeddings"


def _pooled(text: str, pooling: Pooling = Pooling.MEAN) -> list[float]:
    """Return the fake worker's embedding of a text."""
    numbers = [float(len(pooling)), *map(float, text.encode())][:EMBEDDING_SIZE]
    return numbers + [0.0] * (EMBEDDING_SIZE - len(numbers))


def _unit(values: list[float]) -> Any:
    length = math.hypot(*values)
    return pytest.approx([value / length for value in values], abs=1e-6)


# --- what is answered -------------------------------------------------------------------------


async def test_the_client_s_default_is_base64(
    client: openai.AsyncOpenAI, front: RunningGateway
) -> None:
    answer = await client.embeddings.create(model=MODEL, input="mill", user="ada")
    assert (answer.object, answer.model) == ("list", MODEL)
    (made,) = answer.data
    assert (made.object, made.index) == ("embedding", 0)
    assert made.embedding == _unit(_pooled("mill"))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)
    (job,) = front.worker.jobs
    assert (job.pooling, job.user, job.source) == (Pooling.MEAN, "ada", Source.HTTP)
    assert job.prompt_token_ids == tuple(b"mill")
    await eventually(lambda: len(front.gateway.streams) == 0)


async def test_inputs_are_parts_of_the_request_that_the_answer_names(
    client: openai.AsyncOpenAI, front: RunningGateway
) -> None:
    """Every input is a separate job, which names the X-Request-Id of the answer as its request."""
    raw = await client.embeddings.with_raw_response.create(model=MODEL, input=["a", "b"])
    parts = [job.part for job in front.worker.jobs if job.part is not None]
    assert sorted(part.choice for part in parts) == [0, 1]
    assert {part.request_id for part in parts} == {raw.headers["x-request-id"]}
    assert not any(part.shares_prompt for part in parts)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_many_inputs_keep_their_order(
    client: openai.AsyncOpenAI, front: RunningGateway, encoding_format: Any
) -> None:
    texts = [f"text {number}" * (1 + number % 3) for number in range(3 * MAX_JOBS_AT_ONCE)]
    answer = await client.embeddings.create(
        model=MODEL, input=texts, encoding_format=encoding_format
    )
    assert [made.index for made in answer.data] == list(range(len(texts)))
    for made, text in zip(answer.data, texts, strict=True):
        values: Any = made.embedding
        if isinstance(values, str):  # The client reads base64 itself if asked for it.
            values = list(struct.unpack(f"<{EMBEDDING_SIZE}f", base64.b64decode(values)))
        assert values == _unit(_pooled(text))
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    ids = {job.request_id for job in front.worker.jobs}
    first = next(one for one in ids if "." not in one)
    assert ids == {first, *(f"{first}.{number}" for number in range(1, len(texts)))}


async def test_token_ids(client: openai.AsyncOpenAI) -> None:
    one = await client.embeddings.create(model=MODEL, input=[109, 105])
    assert [made.embedding for made in one.data] == [_unit(_pooled("mi"))]
    two = await client.embeddings.create(model=MODEL, input=[[109, 105], [108]])
    assert [made.embedding for made in two.data] == [_unit(_pooled("mi")), _unit(_pooled("l"))]
    assert two.usage.prompt_tokens == 3


async def test_fewer_dimensions_have_length_1(client: openai.AsyncOpenAI) -> None:
    for normalize in (True, False):
        answer = await client.embeddings.create(
            model=MODEL, input="mill", dimensions=3, extra_body={"normalize": normalize}
        )
        assert answer.data[0].embedding == _unit(_pooled("mill")[:3])


async def test_pooling_and_normalize(client: openai.AsyncOpenAI) -> None:
    extra = {"pooling": "last", "normalize": False}
    answer = await client.embeddings.create(
        model=MODEL, input="mill", encoding_format="float", extra_body=extra
    )
    assert answer.data[0].embedding == _pooled("mill", Pooling.LAST)
    whole = await client.embeddings.create(
        model=MODEL, input="mill", dimensions=EMBEDDING_SIZE, extra_body=extra
    )
    assert whole.data[0].embedding == _pooled("mill", Pooling.LAST)


@pytest.mark.parametrize("as_base64", [True, False])
def test_numbers_come_through_exactly(as_base64: bool) -> None:
    values = [0.1, -1e-30, 3.4e38, 1 / 3, 0.0, -0.0, 123456.789]
    pooled = struct.pack("<7f", *values)
    raw = bytes(VectorForm(None, normalize=False, as_base64=as_base64).encode(pooled))
    if as_base64:
        assert base64.b64decode(raw.strip(b'"')) == pooled
    else:
        assert struct.pack("<7f", *map(float, raw[1:-1].split(b","))) == pooled


def test_a_zero_vector_stays_zero_when_normalized() -> None:
    form = VectorForm(None, normalize=True, as_base64=False)
    assert bytes(form.encode(struct.pack("<2f", 0.0, 0.0))) == b"[0,0]"


# --- what is refused --------------------------------------------------------------------------


_BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [""]}, "input[0]"),
    ({"input": ["a", 3]}, "input"),
    ({"input": [[]]}, "input[0]"),
    ({"input": [["a"]]}, "input[0][0]"),
    ({"input": [[3], 4]}, "input"),
    ({"input": [300]}, "input[0]"),
    ({"input": ["x"] * (MAX_INPUTS + 1)}, "input"),
    ({"input": {"text": "x"}}, "input"),
    ({"input": None}, "input"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": EMBEDDING_SIZE + 1}, "dimensions"),
    ({"encoding_format": "int8"}, "encoding_format"),
    ({"pooling": "first"}, "pooling"),
    ({"normalize": 1}, "normalize"),
    ({"user": "x" * 257}, "user"),
    ({"temperature": 1}, "temperature"),
]


async def test_the_bad_field_is_named(http: httpx.AsyncClient, front: RunningGateway) -> None:
    for changes, param in _BAD:
        response = await http.post(_PATH, json={"model": MODEL, "input": "mill"} | changes)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (changes, error)
    assert not front.worker.jobs


async def test_the_bad_input_is_named(http: httpx.AsyncClient, front: RunningGateway) -> None:
    body = {"model": MODEL, "input": [[1, 2], [3, 300]]}
    error = (await http.post(_PATH, json=body)).json()["error"]
    assert error["param"] == "input[1][1]"
    assert error["message"].startswith("input[1][1] ")
    assert not front.worker.jobs


async def test_other_refusals(http: httpx.AsyncClient, front: RunningGateway) -> None:
    unknown = await http.post(_PATH, json={"model": "none", "input": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    long = {"model": MODEL, "input": ["short", "x" * (CONTEXT_WINDOW_TOKENS + 1)]}
    too_long = await http.post(_PATH, json=long)
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert too_long.json()["error"]["param"] == "input[1]"
    assert (await http.get(_PATH)).status_code == 405
    assert (await http.post(_PATH, content=b"{")).json()["error"]["code"] == "invalid_json"
    assert not front.worker.jobs


async def test_a_body_too_large() -> None:
    async with (
        running_gateway(GatewayConfig(max_body_bytes=100)) as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):
        response = await http.post(_PATH, json={"model": MODEL, "input": "x" * 200})
    assert response.status_code == 413


# --- limits -----------------------------------------------------------------------------------


class _Ledger:
    """Record of the limiter's calls ``reserve`` and ``settle_soon``."""

    def __init__(self, limiter: Limiter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved: list[Demand] = []
        self.settled: list[Usage | None] = []
        monkeypatch.setattr(limiter, "reserve", self.reserve)
        monkeypatch.setattr(limiter, "settle_soon", self.settle_soon)

    async def reserve(self, caller: Caller, demand: Demand) -> Granted:
        self.reserved.append(demand)
        limits = LimitSet(tokens_per_minute=9)
        account = Account(kind="tenant", name=caller.tenant, limits=limits)
        return Granted(accounts=(account,), usages=(AccountUsage(),))

    def settle_soon(
        self, _request_id: str, usage: Usage | None, _cost: Decimal | None, _currency: str = ""
    ) -> None:
        self.settled.append(usage)


async def test_tokens_are_set_aside_and_settled(
    http: httpx.AsyncClient, front: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = _Ledger(front.gateway.limiter, monkeypatch)
    body = {"model": MODEL, "input": ["mill", "race"]}
    response = await http.post(_PATH, json=body)
    assert response.headers["x-ratelimit-limit-tokens"] == "9"
    (taken,) = ledger.reserved
    assert (taken.num_prompt_tokens, taken.max_tokens, taken.longest_tokens) == (8, 0, 4)
    assert ledger.settled == [Usage(prompt_tokens=8)]
    front.worker.end_with = Failed(code="internal_error", message="no")
    assert (await http.post(_PATH, json=body)).status_code == 500
    assert ledger.settled[1:] == [None]
    assert (await http.post(_PATH, json=body | {"input": ""})).status_code == 400
    # What is refused counts as a request, of no tokens.
    assert len(ledger.reserved) == len(ledger.settled) == 3
    assert (ledger.reserved[2].num_prompt_tokens, ledger.settled[2]) == (0, Usage())


async def test_a_limit_that_is_reached(
    http: httpx.AsyncClient, front: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_args: Any, **_kwargs: Any) -> Granted:
        raise LimitsUnreachableError

    monkeypatch.setattr(front.gateway.limiter, "reserve", refuse)
    response = await http.post(_PATH, json={"model": MODEL, "input": "mill"})
    assert response.status_code == LimitsUnreachableError.http_status
    assert not front.worker.jobs


# --- what goes wrong on the way ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (Failed(code="non_finite_embedding", message="not finite"), 500),
        (Shed(retry_after_s=3.0), 429),
        (Expired(), 504),
    ],
)
async def test_a_failing_input_fails_the_request(
    http: httpx.AsyncClient, front: RunningGateway, frame: Frame, status: int
) -> None:
    front.worker.end_with = frame
    response = await http.post(_PATH, json={"model": MODEL, "input": ["a", "b"]})
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert ("retry-after" in response.headers) == isinstance(frame, Shed)
    front.worker.end_with = None
    response = await http.post(_PATH, json={"model": MODEL, "input": "a"})
    assert response.status_code == 200
    await eventually(lambda: len(front.gateway.streams) == 0)


async def test_a_client_that_leaves_cancels_all(front: RunningGateway) -> None:
    front.worker.gate.clear()
    num_inputs = MAX_JOBS_AT_ONCE + 10
    async with httpx.AsyncClient(base_url=front.url) as http:
        asking = asyncio.create_task(
            http.post(_PATH, json={"model": MODEL, "input": ["x"] * num_inputs})
        )
        await eventually(lambda: len(front.worker.jobs) == MAX_JOBS_AT_ONCE)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: len(front.worker.cancelled) == MAX_JOBS_AT_ONCE)
    await eventually(lambda: len(front.gateway.streams) == 0)
    assert len(front.worker.jobs) == MAX_JOBS_AT_ONCE


async def test_frames_that_are_lost_are_asked_for_again() -> None:
    async with running_gateway(GatewayConfig(replay_probe_s=0.1)) as front:
        lost: list[Frame] = []

        def lose(frame: Frame) -> bool:
            lost.append(frame)
            return len(lost) == 2  # the embedding itself

        front.worker.lose = lose
        async with httpx.AsyncClient(base_url=front.url, timeout=10.0) as http:
            response = await http.post(
                _PATH, json={"model": MODEL, "input": "mill", "normalize": False}
            )
        assert response.json()["data"][0]["embedding"] == _pooled("mill")
        assert front.worker.replays


async def test_a_gateway_that_goes_says_so(http: httpx.AsyncClient, front: RunningGateway) -> None:
    front.worker.gate.clear()
    asking = asyncio.create_task(http.post(_PATH, json={"model": MODEL, "input": ["a", "b"]}))
    await eventually(lambda: len(front.worker.jobs) == 2)
    await front.gateway.drain(timeout_s=0.0)
    response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in response.headers
    await eventually(lambda: len(front.worker.cancelled) == 2)
