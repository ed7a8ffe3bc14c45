"""Bodies of requests that are read and make no job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from millrace.gateway.core import Gateway
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.http import new_request_id, read_body


@asynccontextmanager
async def counted_body(gateway: Gateway, request: Request) -> AsyncIterator[tuple[Caller, bytes]]:
    """Whose request it is, and its body; what is done within counts as a request of theirs."""
    caller = await gateway.identity.caller(request.scope)
    body = await read_body(request.scope, request.receive, gateway.config)
    async with gateway.admission.counts(caller, new_request_id("tok"), len(body)):
        yield caller, body
