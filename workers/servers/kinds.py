"""Which dialect each kind of inference server speaks."""

from __future__ import annotations

from millrace.schemas.engines import EngineKind
from millrace.workers.servers.dialect import Dialect
from millrace.workers.servers.dialects.llamacpp import LlamaCppDialect
from millrace.workers.servers.dialects.openai import OpenAiDialect
from millrace.workers.servers.dialects.vllm import VllmDialect

DIALECTS: dict[EngineKind, type[Dialect]] = {
    EngineKind.LLAMACPP: LlamaCppDialect,
    EngineKind.VLLM: VllmDialect,
    EngineKind.SGLANG: OpenAiDialect,
    EngineKind.OPENAI: OpenAiDialect,
    EngineKind.TGI: OpenAiDialect,
    EngineKind.TRTLLM: OpenAiDialect,
}
