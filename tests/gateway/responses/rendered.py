"""Requests and answers without a gateway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.responses.input import (
    check_fields,
    generation_request_of,
    given_items,
)
from millrace.gateway.responses.renderer import ResponseRenderer
from millrace.gateway.streams.parts import Part
from millrace.gateway.tenancy.identity import LOCAL
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.schemas.frames import TokenLogprob, Usage
from millrace.schemas.openai import LogprobInfo
from millrace.schemas.responses.items import Item, ItemReference, ResponsesRequest
from millrace.schemas.sampling import SamplingDefaults

DECODER = msgspec.json.Decoder(ResponsesRequest)


def items_of(given: Any) -> tuple[Item, ...]:
    """The items of an input without references."""
    items = given_items(given).items
    return tuple(item for item in items if not isinstance(item, ItemReference))


def request_of(**fields: Any) -> ResponsesRequest:
    body = {"model": "echo", "input": "hi"} | fields
    request = decode(DECODER, json.dumps(body).encode())
    check_fields(request)
    return request


def asked(**fields: Any) -> GenerationRequest:
    request = request_of(**fields)
    given = given_items(request.input)
    return generation_request_of(request, items_of(request.input), given.notices, given.paths)


def describe(entries: Sequence[TokenLogprob]) -> tuple[LogprobInfo, ...]:
    return tuple(LogprobInfo(token="t", logprob=one.logprob, bytes=(116,)) for one in entries)


def renderer_of(
    request: ResponsesRequest | None = None,
) -> ResponseRenderer:
    request = request or request_of()
    items = items_of(request.input)
    response = SimpleNamespace(
        request_id="resp-0123456789abcdef01234567",
        created_s=1_700_000_000,
        caller=LOCAL,
        model=SimpleNamespace(sampling_defaults=SamplingDefaults()),
        choices=[SimpleNamespace(had=())],
        request=generation_request_of(request, items),
        usage=Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=9),
        notices=(),
    )
    return ResponseRenderer(request, cast("ResponseReader", response), (), items, None, describe)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def stream_of(parts: Sequence[Part], renderer: ResponseRenderer | None = None) -> bytes:
    renderer = renderer or renderer_of()
    return renderer.first() + bytes_of(renderer, parts) + renderer.last()


def bytes_of(renderer: ResponseRenderer, parts: Sequence[Part]) -> bytes:
    """The events of parts."""
    return b"".join([piece for part in parts for piece in renderer.part(part)])
