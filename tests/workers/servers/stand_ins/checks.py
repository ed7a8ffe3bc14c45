"""Engines on stand-in servers, and the checks that each of them passes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from millrace.engine.types import EngineRequest
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.frames import FinishReason
from millrace.workers.servers.server_engine import ServerEngine
from millrace.workers.servers.starting import start_server_engine
from tests.support.repository import ROOT
from tests.support.waiting import eventually
from tests.workers.conformance import Heard, request
from tests.workers.scripted import EOS
from tests.workers.servers.stand_ins.listening import Busy, listening

# A stand-in that ends by itself makes so many tokens first.
END_AT = 5


class StandIn(Protocol):
    """Stand-in server that answers every request itself."""

    async def handle(self, request: web.Request) -> web.StreamResponse: ...


@asynccontextmanager
async def attached(
    model: ServedModel, kind: EngineKind, url: str, **config: Any
) -> AsyncIterator[ServerEngine]:
    """Attach an engine of this kind to the server at ``url``."""
    settings = EngineConfig(kind=kind, url=url, start_timeout_s=5.0, **config)
    engine = await start_server_engine(model, settings, SystemClock())
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def attached_to(
    kind: EngineKind, model: ServedModel, server: StandIn, **config: Any
) -> AsyncIterator[ServerEngine]:
    """Attach an engine of this kind to a stand-in, which listens until the block ends."""
    async with (
        listening(server.handle) as url,
        attached(model, kind, url, **config) as engine,
    ):
        yield engine


@asynccontextmanager
async def launched(
    model: ServedModel, kind: EngineKind, program: Path, stand_in: str
) -> AsyncIterator[ServerEngine]:
    """Launch an engine of this kind whose server is a module beside this one, under the name of
    ``program``."""
    module = f"{__package__}.{stand_in}"
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m {module} {kind} "$@"\n')
    program.chmod(0o755)
    config = EngineConfig(kind=kind, command=str(program), start_timeout_s=30.0)
    engine = await start_server_engine(model, config, SystemClock())
    try:
        yield engine
    finally:
        await engine.close()


def steered_request() -> EngineRequest:
    """Return a request of four tokens with many of the fields of a request."""
    asked = request(
        "r", max_tokens=4, min_tokens=2, stop_token_ids=(5,), logit_bias={7: 1.5}, top_k=3
    )
    return msgspec.structs.replace(asked, eos_token_ids=(1,), cache_salt="s", priority=5)


async def check_cancel(engine: ServerEngine, server: Busy) -> None:
    """Check that a cancel frees the slot at the server, which takes time for each of its tokens."""
    heard = Heard(engine)
    engine.add(request("gone", max_tokens=90))
    await eventually(lambda: len(heard.tokens("gone")) > 2)
    engine.cancel("gone")
    await eventually(lambda: server.num_running == 0)


async def check_end(engine: ServerEngine) -> None:
    """Check that the end of a sequence is its last token, with a stand-in that ends at
    ``END_AT``."""
    heard = Heard(engine)
    engine.add(msgspec.structs.replace(request("r"), eos_token_ids=(EOS,)))
    await heard.ended("r")
    end = heard.end("r")
    assert end is not None
    assert end.finish_reason is FinishReason.STOP
    assert len(heard.tokens("r")) == END_AT + 1
    assert heard.tokens("r")[-1] == EOS


async def check_refused(engine: ServerEngine, asked: EngineRequest, code: str, says: str) -> None:
    """Check that the request fails by the caller's own mistake."""
    heard = Heard(engine)
    engine.add(asked)
    await heard.ended(asked.request_id)
    end = heard.end(asked.request_id)
    assert end is not None
    assert end.error is not None
    assert end.error[0] == code
    assert says in end.error[1]
