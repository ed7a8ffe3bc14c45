"""Tests that all servers share for which a stand-in answers, as their documentation says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError, MillraceError
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.dialect import ServerAddress
from millrace.workers.servers.dialects.sglang import SglangDialect
from millrace.workers.servers.dialects.tgi import TgiDialect
from millrace.workers.servers.dialects.trtllm import TrtllmDialect
from millrace.workers.servers.dialects.vllm import VllmDialect
from tests.workers.conformance import Heard, request
from tests.workers.servers.stand_ins.checks import (
    END_AT,
    attached_to,
    check_cancel,
    check_end,
    launched,
)
from tests.workers.servers.stand_ins.sglang_server import SglangServer
from tests.workers.servers.stand_ins.tgi_server import TgiServer
from tests.workers.servers.stand_ins.trtllm_server import TrtllmServer

SGLANG, TGI, TRTLLM = EngineKind.SGLANG, EngineKind.TGI, EngineKind.TRTLLM
VLLM = EngineKind.VLLM


class _OtherTokenizer:
    """Cuts texts otherwise than the model's."""

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(character) % 300 for character in text]


def _sglang(model: ServedModel, tokenizer: Any = None, **changes: Any) -> SglangServer:
    server = SglangServer(model.tokenizer, model.vocab_size, **changes)
    server.tokenizer = tokenizer or server.tokenizer
    return server


def _tgi(model: ServedModel, tokenizer: Any = None, **changes: Any) -> TgiServer:
    return TgiServer(tokenizer or model.tokenizer, **changes)


def _trtllm(model: ServedModel, tokenizer: Any = None, **changes: Any) -> TrtllmServer:
    return TrtllmServer(tokenizer or model.tokenizer, **changes)


_SERVERS: dict[EngineKind, Callable[..., Any]] = {SGLANG: _sglang, TGI: _tgi, TRTLLM: _trtllm}
_DIALECTS: dict[EngineKind, Callable[..., Any]] = {
    SGLANG: SglangDialect,
    TGI: TgiDialect,
    TRTLLM: TrtllmDialect,
    VLLM: VllmDialect,
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SGLANG, "kernels", "torch"),
        (SGLANG, "kv_cache_bytes", 1 << 30),
        (TGI, "kernels", "torch"),
        (TGI, "kv_cache_bytes", 1),
        (TGI, "overlap", False),
        (TGI, "load_format", "dummy"),
        (TRTLLM, "kernels", "torch"),
        (TRTLLM, "kv_cache_bytes", 1),
        (TRTLLM, "device", "cpu"),
        (VLLM, "num_blocks", 9),
        (VLLM, "kernels", "torch"),
        (VLLM, "deterministic", True),
        (VLLM, "ageing_s", 1.0),
        (VLLM, "itl_bound_ms", 5.0),
        (VLLM, "host_cache_bytes", 0),
        (VLLM, "idle_offload_s", 1.0),
        (VLLM, "collectives", "gloo"),
    ],
)
def test_a_setting_that_it_does_not_have_is_refused_by_name(
    model: ServedModel, tmp_path: Path, kind: EngineKind, name: str, value: object
) -> None:
    config = EngineConfig(kind=kind, **{name: value})  # type: ignore[arg-type]
    address = ServerAddress(tmp_path, 4711, "secret")
    with pytest.raises(ConfigError, match=rf"worker\.engine\.{name} "):
        _DIALECTS[kind](model, config, owned=True).command(Path("/bin/server"), address)


class _Refused(NamedTuple):
    """The URL leads to another kind of server: the engine does not start, and says why."""

    kind: EngineKind
    changes: dict[str, Any]
    config: dict[str, Any]
    error: type[MillraceError]
    says: str


_REFUSED = (
    _Refused(SGLANG, {"version": "0.4.6"}, {}, ConfigError, "0.5.4 or newer is needed"),
    _Refused(SGLANG, {"version": None}, {}, EngineFailedError, "does not say its version"),
    _Refused(SGLANG, {"window": 64}, {}, ConfigError, "context window is 64 tokens"),
    _Refused(SGLANG, {"api_key": "o"}, {"api_key": "k"}, EngineFailedError, "status 401"),
    _Refused(SGLANG, {}, {"served_name": "llama"}, ConfigError, "no model 'llama'"),
    _Refused(SGLANG, {"tokenizer": _OtherTokenizer()}, {}, ConfigError, "tokenizer is not that of"),
    _Refused(TGI, {"version": "1.4.5"}, {}, ConfigError, r"2\.0 or newer is needed"),
    _Refused(TGI, {"info": {"max_total_tokens": None}}, {}, EngineFailedError, "no tgi server"),
    _Refused(TGI, {"window": 64}, {}, ConfigError, "context window is 64 tokens"),
    _Refused(TGI, {"info": {"max_input_tokens": 99}}, {}, ConfigError, "window is 100 tokens"),
    _Refused(TGI, {"api_key": "o"}, {"api_key": "k"}, EngineFailedError, "status 401"),
    _Refused(TGI, {"tokenizer": _OtherTokenizer()}, {}, ConfigError, "tokenizer is not that of"),
    _Refused(TRTLLM, {"version": "0.20.0"}, {}, ConfigError, r"1\.0 or newer is needed"),
    _Refused(TRTLLM, {"version": None}, {}, EngineFailedError, "does not say its version"),
    _Refused(TRTLLM, {}, {"served_name": "llama"}, ConfigError, "no model 'llama'"),
    _Refused(TRTLLM, {"tokenizer": _OtherTokenizer()}, {}, ConfigError, "it has another model"),
)


@pytest.mark.parametrize("refused", _REFUSED, ids=lambda one: f"{one.kind.value}-{one.says}")
async def test_a_server_without_the_model_is_refused(model: ServedModel, refused: _Refused) -> None:
    server = _SERVERS[refused.kind](model, **refused.changes)
    with pytest.raises(refused.error, match=refused.says):
        async with attached_to(refused.kind, model, server, **refused.config):
            """Never reached."""


@pytest.mark.parametrize(
    ("kind", "program"),
    [(SGLANG, "sglang"), (TGI, "text-generation-launcher"), (TRTLLM, "trtllm-serve")],
)
async def test_it_is_started_on_a_port(
    model: ServedModel, tmp_path: Path, kind: EngineKind, program: str
) -> None:
    """With a key, which the stand-ins of SGLang and TGI want of each request, as these do."""
    async with launched(model, kind, tmp_path / program, f"{kind.value}_server") as engine:
        heard = Heard(engine)
        engine.add(request("r"))
        await heard.ended("r")
        assert len(heard.tokens("r")) == 12
        if kind is TRTLLM:
            assert engine.stats.max_num_sequences == 64
            return
        method, path = {SGLANG: ("GET", "server_info"), TGI: ("POST", "tokenize")}[kind]
        url = f"{engine._client.url}/{path}"
        async with aiohttp.ClientSession() as others, others.request(method, url) as answer:
            assert answer.status == 401


@pytest.mark.parametrize("kind", [TGI, TRTLLM])
async def test_an_end_of_the_sequence_is_its_last_token(
    model: ServedModel, kind: EngineKind
) -> None:
    async with attached_to(kind, model, _SERVERS[kind](model, end_at=END_AT)) as engine:
        await check_end(engine)


@pytest.mark.parametrize("kind", [TGI, TRTLLM])
async def test_a_cancel_ends_the_connection(model: ServedModel, kind: EngineKind) -> None:
    server = _SERVERS[kind](model, token_s=0.02)
    async with attached_to(kind, model, server) as engine:
        await check_cancel(engine, server)


@pytest.mark.parametrize(("kind", "breaks_at"), [(TGI, {1: 1, 2: 2, 3: 3}), (TRTLLM, {1: 1, 2: 5})])
async def test_a_stream_that_broke_goes_on_where_it_stopped(
    model: ServedModel, kind: EngineKind, breaks_at: dict[int, int]
) -> None:
    """TGI is given text, which may end within a character."""
    tokens = []
    for breaks in ({}, breaks_at):
        server = _SERVERS[kind](model, breaks_at=breaks)
        async with attached_to(kind, model, server) as engine:
            heard = Heard(engine)
            engine.add(request("r", max_tokens=30))
            await heard.ended("r")
            assert len(server.calls) == 1 + len(breaks)
            tokens.append(heard.tokens("r"))
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 30
