"""Capabilities of each OpenAI-compatible server beyond OpenAI's /v1/completions.

``schemas.engines.PROMISES`` lists the sampling fields that a server reads, and whether its token
ids are exact. This module has how to start a server, what it reports, and the extra fields of its
``/v1/completions``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.workers.servers.dialect import Command, ServerAddress, ServerFacts, ServerLoad
from millrace.workers.servers.dialects.commands import (
    TGI_SPARE,
    TRTLLM_NUM_SEQUENCES,
    sglang_command,
    tgi_command,
    trtllm_command,
)
from millrace.workers.servers.dialects.server_facts import read_samples

_KV_USAGE = "sglang:token_usage"
_STEPS = "tgi_batch_inference_count"
# Some servers keep a seed in 32 bits, one of them for the sign.
_SHORT_SEED, _LONG_SEED = 2**31 - 1, 2**63 - 1

_CommandOf = Callable[[Path, ServerAddress, ServedModel, EngineConfig], Command]


class OpenAiServer(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of one kind of server.

    - ``command`` starts it. Without one the worker only attaches to a running server.
    - ``info_paths``: the first that exists reports the version, and ``facts`` reads the rest of it.
    - ``load`` reads the figures at ``load_path``; None means that there are none this time.
    - ``fields`` are sent with each request, ``probe`` with the first completion, whose answer must
      have the token ids of the prompt.
    - ``ends_only_by_names``: it takes ``stop_token_ids`` under ``ignore_eos``.
    - ``rejects_neutral`` are fields that it rejects at their neutral value.
    - ``refuses_when_full``: it has no queue, so it gets no more requests than it runs.
    """

    name: str
    package: str = ""
    program: str = ""
    oldest_version: tuple[int, ...] = ()
    command: _CommandOf | None = None
    num_sequences: int = 0
    health_path: str = "/health"
    reset_path: str = ""
    abort_path: str = ""
    info_paths: tuple[str, ...] = ()
    facts: Callable[[dict[str, Any]], ServerFacts] = lambda info: ServerFacts()  # noqa: ARG005
    load_path: str = ""
    load: Callable[[bytes], ServerLoad | None] = lambda answer: None  # noqa: ARG005
    fields: Mapping[str, Any] = {}
    probe: Mapping[str, Any] = {}
    no_top_k: int = 0
    max_seed: int = _LONG_SEED
    ends_only_by_names: bool = False
    rejects_neutral: frozenset[str] = frozenset()
    refuses_when_full: bool = False
    has_priorities: bool = False
    has_cache_salts: bool = False


def _sglang_facts(info: dict[str, Any]) -> ServerFacts:
    def number(name: str) -> int:
        """Return a figure, from wherever this version has it; 0 if nowhere."""
        states = info.get("internal_states")
        for place in (info, *(states if isinstance(states, list) else ())):
            found = place.get(name) if isinstance(place, dict) else None
            if isinstance(found, int):
                return found
        return 0

    return ServerFacts(
        kv_capacity_tokens=number("max_total_num_tokens"),
        max_num_sequences=number("max_running_requests"),
    )


def _sglang_load(answer: bytes) -> ServerLoad:
    usages = read_samples(answer, [_KV_USAGE])[_KV_USAGE]
    return ServerLoad(kv_usage=sum(usages) / len(usages) if usages else 0.0)


def _tgi_facts(info: dict[str, Any]) -> ServerFacts:
    room = int(info["max_concurrent_requests"])
    return ServerFacts(
        model=str(info["model_id"]),
        # A prompt of the maximum length leaves room for at least one token.
        context_window_tokens=min(int(info["max_total_tokens"]), int(info["max_input_tokens"]) + 1),
        max_num_sequences=max(1, room - -(-room // TGI_SPARE)),
    )


def _tgi_load(answer: bytes) -> ServerLoad:
    return ServerLoad(num_steps=int(sum(read_samples(answer, [_STEPS])[_STEPS])))


class _TrtllmCache(msgspec.Struct):
    usedNumBlocks: int = 0  # noqa: N815
    maxNumBlocks: int = 0  # noqa: N815


class _TrtllmStep(msgspec.Struct):
    iter: int = 0
    kvCacheStats: _TrtllmCache | None = None  # noqa: N815


def _trtllm_load(answer: bytes) -> ServerLoad | None:
    """Return the figures of the last reported step. Each step is reported once, and none while
    idle.
    """
    try:
        steps = msgspec.json.decode(answer, type=list[_TrtllmStep])
    except msgspec.MsgspecError:
        return None
    if not steps:
        return None
    cache = steps[-1].kvCacheStats or _TrtllmCache()
    blocks = cache.maxNumBlocks
    return ServerLoad(
        kv_usage=cache.usedNumBlocks / blocks if blocks else 0.0, num_steps=steps[-1].iter
    )


SERVERS: dict[EngineKind, OpenAiServer] = {
    EngineKind.OPENAI: OpenAiServer(
        # All of these servers list their models.
        name="OpenAI-compatible",
        health_path="/models",
        max_seed=_SHORT_SEED,
    ),
    EngineKind.SGLANG: OpenAiServer(
        name="SGLang",
        package="sglang",
        program="sglang",
        oldest_version=(0, 5, 4),
        command=sglang_command,
        reset_path="/flush_cache",
        abort_path="/abort_request",
        info_paths=("/server_info", "/get_server_info"),
        facts=_sglang_facts,
        load_path="/metrics",
        load=_sglang_load,
        fields={"return_token_ids": True, "skip_special_tokens": False, "no_stop_trim": True},
        probe={"return_token_ids": True},
        no_top_k=-1,
        has_priorities=True,
        has_cache_salts=True,
    ),
    EngineKind.TGI: OpenAiServer(
        name="TGI",
        package="text-generation-inference",
        program="text-generation-launcher",
        oldest_version=(2, 0),
        command=tgi_command,
        info_paths=("/info",),
        facts=_tgi_facts,
        load_path="/metrics",
        load=_tgi_load,
        rejects_neutral=frozenset({"top_p"}),
        refuses_when_full=True,
    ),
    EngineKind.TRTLLM: OpenAiServer(
        name="TensorRT-LLM",
        package="tensorrt-llm",
        program="trtllm-serve",
        oldest_version=(1, 0),
        command=trtllm_command,
        num_sequences=TRTLLM_NUM_SEQUENCES,
        info_paths=("/version",),
        load_path="/metrics",
        load=_trtllm_load,
        fields={"include_stop_str_in_output": True, "detokenize": False},
        ends_only_by_names=True,
    ),
}
