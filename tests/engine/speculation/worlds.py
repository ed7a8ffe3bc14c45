"""Engines with and without proposals on one checkpoint, and their answers to a load."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.speculation.speculator import Speculator
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.workers.process.wire import Stepped, Unpacker, pack, report_decoder

VOCAB_SIZE = 448
NAN_TOKEN = 440
MAX_STEPS = 5_000


def load(checkpoint: Path, speculation: str, **settings: Any) -> Engine:
    """Load an engine in bfloat16 by the compiled kernels."""
    given: dict[str, Any] = {
        "num_blocks": 256,
        "device": "cpu",
        "dtype": "bfloat16",
        "kernels": "native",
        "speculation": speculation,
    }
    return Engine.load(checkpoint, EngineConfig(**given | settings))


class Answer(NamedTuple):
    """Outputs of an engine for one choice."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]
    ends: list[FinishReason | str]


Answers = dict[tuple[str, int], Answer]


def run(engine: Engine, requests: list[EngineRequest], gaps: list[int] | None = None) -> Answers:
    """Return the answers to requests; each request arrives ``gaps`` steps after the one before."""
    answers: Answers = {}
    waits = iter(gaps or [])
    queued = list(requests)
    wait = 0
    for _ in range(MAX_STEPS):
        while queued and wait <= 0:
            engine.add(queued.pop(0))
            wait = next(waits, 0)
        wait -= 1
        if not engine.has_work and not queued:
            return answers
        outputs = engine.step()
        (message,) = Unpacker().feed(pack(Stepped(outputs, engine.stats())))
        read = report_decoder.decode(message)
        assert isinstance(read, Stepped)
        assert len(read.outputs) == len(outputs), "the bus side cannot read it"
        for output in outputs:
            key = output.request_id, output.choice
            answer = answers.setdefault(key, Answer([], [], [], []))
            assert not answer.ends, "an output after the last one"
            answer.token_ids.extend(output.token_ids)
            answer.logprobs.extend(output.logprobs)
            answer.prompt_logprobs.extend(output.prompt_logprobs)
            if output.error is not None:
                answer.ends.append(output.error[0])
            elif output.finish_reason is not None:
                answer.ends.append(output.finish_reason)
        engine.check_integrity()
    raise AssertionError("somebody never ends")


class Guesses:
    """Speculator that proposes the tokens of another run, with some replaced, at any cost."""

    def __init__(self, known: Answers, seed: int, share_right: float, most: int = 8) -> None:
        self._known = known
        self._random = random.Random(seed)
        self._share_right = share_right
        self._most = most

    def into(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def propose(speculator: Speculator, plan: list[ScheduledSequence]) -> None:
            for sequence, num_tokens in plan:
                plain = sequence.fork_group is None and sequence.prompt_logprobs is None
                if num_tokens > 1 or sequence.forks or not sequence.started or not plain:
                    continue
                made = sequence.token_ids[sequence.num_prompt_tokens :]
                known = self._known[sequence.request_id, sequence.choice].token_ids
                assert known[: len(made)] == made, "it has gone another way"
                room = sequence.max_total_tokens - sequence.num_tokens - 1
                left = speculator._budget(plan, 0.0) - sum(len(one.proposed) for one, _ in plan)
                most = max(0, min(self._random.randrange(self._most + 1), room, left))
                guess = [
                    token
                    if self._random.random() < self._share_right
                    else self._random.randrange(VOCAB_SIZE)
                    for token in known[len(made) : len(made) + most]
                ]
                count = speculator._tables.allocate_ahead(sequence, len(guess))
                sequence.proposed = guess[:count]

        monkeypatch.setattr(Speculator, "propose", propose)
