"""Small random model with a tokenizer, and its completions under a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.config import EngineConfig
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import Grammar, GrammarKind
from tests.engine.checkpoints import save_llama
from tests.engine.support import drain, request
from tests.support.engine.tokenizers_made import byte_level, write_tokenizer

# More than the tokenizer has: the ids beyond it must never come.
VOCAB_SIZE = 448
PROMPT = [0, 70, 71, 72]
WORDS = r"[a-z]{2,6}( [a-z]{2,6}){3}"


def save_checkpoint(path: Path) -> Path:
    """Save a random Llama with a byte-level tokenizer."""
    save_llama(
        path,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4_096,
        bos_token_id=0,
        eos_token_id=1,
    )
    return write_tokenizer(path, byte_level())


def load_engine(path: Path, **config: Any) -> Engine:
    settings: dict[str, Any] = {"num_blocks": 1_024, "device": "cpu"} | config
    return Engine.load(path, EngineConfig(**settings))


def helper_processes() -> list[psutil.Process]:
    """Return the helper processes in which this process tries grammars."""
    return [
        child
        for child in psutil.Process().children()
        if any("grammar.probe" in word for word in child.cmdline())
    ]


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def ebnf(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.EBNF, text=text)


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(value))


def ask(request_id: str, grammar: Grammar | None, **params: Any) -> EngineRequest:
    """Return a request that draws at temperature 1 from a seed of its own."""
    seed = sum(request_id.encode()) * 7_919
    settings: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 400}
    settings |= {"eos_token_ids": (1,), "grammar": grammar} | params
    return request(request_id, settings.pop("prompt", PROMPT), **settings)


class Answers:
    """Outputs of an engine, by request id and choice."""

    def __init__(self, outputs: list[EngineOutput], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], EngineOutput] = {}
        for output in outputs:
            key = output.request_id, output.choice
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finished:
                assert key not in self.ends, f"{key} ended twice"
                self.ends[key] = output

    def text(self, request_id: str, choice: int = 0) -> str:
        tokens = self.tokens[request_id, choice]
        assert all(token < self._tokenizer.vocab_size for token in tokens)
        return self._tokenizer.decode(tokens)

    def reason(self, request_id: str, choice: int = 0) -> FinishReason | None:
        return self.ends[request_id, choice].finish_reason

    def error(self, request_id: str, choice: int = 0) -> tuple[str, str] | None:
        return self.ends[request_id, choice].error


def run(engine: Engine, tokenizer: Tokenizer, *requests: EngineRequest) -> Answers:
    """Run requests together to their ends."""
    for one in requests:
        engine.add(one)
    return Answers(drain(engine), tokenizer)
