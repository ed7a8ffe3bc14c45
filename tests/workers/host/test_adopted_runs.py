"""Streams that move between attempts: they read as if they had not, wherever they move."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.bus.frame_reader import StreamReader
from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, CancelReason
from millrace.schemas.frames import Done, FinishReason, TokenLogprob
from tests.workers.scripted import Bench, bench

_SENTENCE = "naïve café 你好, then the END is near"
_PROMPT_SCORES = (None, TokenLogprob(11, -1.0, ((11, -1.0),)), TokenLogprob(12, -2.0, ()))
_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ("END", "the E")},
    "held back to the end": {"stop": ("near and far",)},
    "logprobs": {"logprobs": 1, "prompt_logprobs": 0},
}


def _score(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -token_id / 100, ((token_id, -token_id / 100), (7, -9.0)))


class _Client:
    """Client that reads a stream as a gateway does."""

    def __init__(self) -> None:
        self.reader = StreamReader()
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self._num_frames = 0

    def read(self, b: Bench) -> None:
        for frame in b.of()[self._num_frames :]:
            self.reader.feed(frame)
        self._num_frames = len(b.of())
        progress = self.reader.take()
        self.text += progress.text
        self.logprobs += progress.logprobs

    def read_all(self) -> tuple[object, ...]:
        reader = self.reader
        assert reader.usage is not None
        return (
            *(tuple(reader.token_ids), self.text, tuple(self.logprobs)),
            *(reader.prompt_logprobs, _without_epoch(reader.terminal)),
            reader.usage.completion_tokens,
        )


def _without_epoch(end: object) -> object:
    assert isinstance(end, Done)
    return (end.finish_reason, end.num_tokens, end.num_prompt_logprobs)


def _emit(b: Bench, engine_id: str, tokens: list[int], index: int, params: dict[str, Any]) -> None:
    """Emit the engine's output of token ``index``, unless the worker has ended the request."""
    if b.worker.requests.num_running == 0:
        return
    is_first, is_last = engine_id not in b.engine.started, index == len(tokens) - 1
    wants_scores = "logprobs" in params
    b.engine.step(
        EngineOutput(
            request_id=engine_id,
            token_ids=(tokens[index],),
            started=is_first,
            logprobs=(_score(tokens[index]),) if wants_scores else (),
            prompt_logprobs=_PROMPT_SCORES if wants_scores and is_first else (),
            finish_reason=FinishReason.LENGTH if is_last else None,
        )
    )


async def _run(demo: ServedModel, params: dict[str, Any], cut: int | None) -> tuple[object, ...]:
    """Return the client's view of an attempt that moves after ``cut`` of its tokens, or never."""
    tokens = demo.tokenizer.encode(_SENTENCE, False)
    client = _Client()
    async with bench(demo) as b:
        job = b.job(sampling=params | {"max_tokens": len(tokens)})
        await b.dispatch(job)
        for index in range(len(tokens) if cut is None else cut):
            _emit(b, "r1:1", tokens, index, params)
            await b.settle(0.02 if index % 2 else 0.0)
            client.read(b)
        if cut is not None and b.worker.requests.num_running:
            await b.command(Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=2))
            has = client.reader.token_ids
            assert has == tokens[: len(has)]
            lease = "$ACK.demo.2.1"
            await b.dispatch(job, epoch=2, lease=lease, resume_token_ids=tuple(has))
            for index in range(len(has), len(tokens)):
                _emit(b, "r1:2", tokens, index, params)
                await b.settle(0.02)
        await b.ended()
        client.read(b)
        return client.read_all()


@pytest.mark.parametrize("case", _CASES)
async def test_a_stream_that_moves_behind_any_token_reads_as_if_it_had_not(
    demo: ServedModel, case: str
) -> None:
    params = _CASES[case]
    undisturbed = await _run(demo, params, None)
    for cut in range(len(demo.tokenizer.encode(_SENTENCE, False))):
        assert await _run(demo, params, cut) == undisturbed, cut
