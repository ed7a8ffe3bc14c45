"""What is measured: weights of one kind, and the loads."""

from __future__ import annotations

from typing import Final

from benchmarks.peers.loads import distinct
from benchmarks.support.gguf_files import MatrixType
from millrace.schemas.config import EngineConfig

WIDE: Final = "bfloat16"
# Ours, and llama.cpp's format of as many bits.
PEER_FORMATS: Final[dict[str, MatrixType]] = {"int8": "q8_0", "int4": "q4_0"}
KINDS: Final = (WIDE, *PEER_FORMATS)
LOADS: Final = (distinct(1, 4), distinct(8, 24), distinct(32, 96))


def settings(kind: str) -> EngineConfig:
    """The engine's, for weights that are rounded to ``kind`` while they are loaded."""
    return EngineConfig(
        dtype=WIDE,
        device="cpu",
        max_num_sequences=max(load.streams for load in LOADS),
        quantization=None if kind == WIDE else kind,
    )
