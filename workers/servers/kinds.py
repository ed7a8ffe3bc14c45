"""Which dialect each kind of inference server speaks."""

from __future__ import annotations

from schemas.engines import EngineKind
from workers.servers.dialect import Dialect
from workers.servers.dialects.llamacpp import LlamaCppDialect
from workers.servers.dialects.openai import OpenAiDialect
from workers.servers.dialects.sglang import SglangDialect
from workers.servers.dialects.tgi import TgiDialect
from workers.servers.dialects.trtllm import TrtllmDialect
from workers.servers.dialects.vllm import VllmDialect

DIALECTS: dict[EngineKind, type[Dialect]] = {
    EngineKind.LLAMACPP: LlamaCppDialect,
    EngineKind.VLLM: VllmDialect,
    EngineKind.SGLANG: SglangDialect,
    EngineKind.OPENAI: OpenAiDialect,
    EngineKind.TGI: TgiDialect,
    EngineKind.TRTLLM: TrtllmDialect,
}
