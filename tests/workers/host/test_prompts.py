"""Embeddings and prompt log-probabilities of a worker."""

from __future__ import annotations

import struct
from typing import Any

from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Replay
from millrace.schemas.frames import (
    Done,
    Embedding,
    Failed,
    FinishReason,
    PromptLogprobs,
    TokenLogprob,
    Usage,
)
from millrace.schemas.pooling import Pooling
from millrace.workers.host.generations.frames import MAX_PROMPT_LOGPROBS_PER_FRAME
from tests.support.waiting import eventually
from tests.workers.scripted import Bench, bench

_VALUES = (0.5, -1.25, 3.0)
_BYTES = struct.pack("<3f", *_VALUES)
_SCORES = (None, TokenLogprob(11, -0.5, ((11, -0.5),)), TokenLogprob(12, -2.0, ((4, -0.25),)))


def _embed(b: Bench, engine_id: str = "r1:1") -> None:
    b.engine.step(
        EngineOutput(
            request_id=engine_id,
            started=True,
            queued_s=0.0,
            num_cached_tokens=1,
            embedding=_VALUES,
            finish_reason=FinishReason.STOP,
        )
    )


def _score(b: Bench, engine_id: str = "r1:1", **changes: Any) -> None:
    output: dict[str, Any] = {"token_ids": (20,), "prompt_logprobs": _SCORES, "started": True}
    b.engine.step(EngineOutput(request_id=engine_id, **(output | changes)))


def _text(b: Bench, token_ids: list[int]) -> str:
    return b.model.tokenizer.decode(token_ids)


# --- embeddings -------------------------------------------------------------------------------


async def test_an_embedding_takes_the_place_of_tokens(demo: ServedModel) -> None:
    async with bench(demo) as b:
        job = b.job(pooling=Pooling.MEAN, sampling={"max_tokens": 1}, store_result=True)
        assert (await b.dispatch(job)).ok
        assert b.engine.added["r1:1"].pooling is Pooling.MEAN
        _embed(b)
        done = Done(epoch=1, finish_reason=FinishReason.STOP, num_tokens=0, embedding_bytes=12)
        assert await b.ended() == done
        assert b.kinds() == ["Started", "Embedding", "Usage", "Done"]
        assert b.of()[1] == Embedding(epoch=1, values=_BYTES)
        assert b.of()[2] == Usage(epoch=1, prompt_tokens=3, cached_tokens=1)
        result = await b.peer.results.fetch("local", "r1")
        assert result is not None
        assert (result.embedding, result.text, result.token_ids) == (_BYTES, "", ())
        (record,) = await b.records()
        assert (record.prompt_tokens, record.completion_tokens) == (3, 0)
        assert await b.num_queued() == 0


async def test_an_embedding_is_sent_again(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(pooling=Pooling.LAST))
        _embed(b)
        await b.ended()
        first = list(b.of())
        b.frames.clear()
        assert (await b.command(Replay(request_id="r1", from_index=0, reply="gw"))).ok
        await eventually(lambda: len(b.of()) == len(first))
        assert b.of() == first
        b.frames.clear()
        # Delivered again, it is told under the new epoch.
        await b.dispatch(b.job(pooling=Pooling.LAST), epoch=65, lease="$ACK.demo.2.1")
        assert (await b.ended()).epoch == 65
        assert b.kinds() == ["Embedding", "Usage", "Done"]
        assert list(b.engine.added) == ["r1:1"]


async def test_an_embedding_has_no_tokens_to_resume_behind(demo: ServedModel) -> None:
    async with bench(demo) as b:
        job = b.job(pooling=Pooling.LAST)
        reply = await b.dispatch(job, lease="$ACK.demo.1.1", resume_token_ids=(4,))
        assert (reply.ok, reply.reason) == (False, "bad_request")


async def test_an_embedding_that_fails(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(pooling=Pooling.LAST))
        error = ("non_finite_embedding", "not finite")
        b.engine.step(EngineOutput(request_id="r1:1", started=True, error=error))
        assert await b.ended() == Failed(epoch=1, code=error[0], message=error[1])
        assert "Embedding" not in b.kinds()


async def test_an_embedding_outlives_its_engine(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(pooling=Pooling.MEAN))
        b.engine.step(EngineOutput(request_id="r1:1", started=True))
        before = b.engine
        before.fail("exit code -9")
        await eventually(lambda: b.engine is not before and "r1:1" in b.engine.added)
        _embed(b)
        await b.ended()
        assert b.kinds() == ["Started", "Embedding", "Usage", "Done"]


# --- prompt log-probabilities -----------------------------------------------------------------


async def test_prompt_logprobs_come_before_the_first_token(demo: ServedModel) -> None:
    async with bench(demo) as b:
        job = b.job(sampling={"prompt_logprobs": 1}, store_result=True)
        await b.dispatch(job)
        b.engine.step(EngineOutput(request_id="r1:1", started=True))
        _score(b, started=False)
        b.engine.emit("r1:1", [21], FinishReason.LENGTH)
        end = await b.ended()
        assert isinstance(end, Done)
        assert (end.num_tokens, end.num_prompt_logprobs) == (2, 3)
        assert b.kinds() == ["Started", "PromptLogprobs", "Delta", "Delta", "Usage", "Done"]
        assert b.of()[1] == PromptLogprobs(epoch=1, logprobs=_SCORES)
        result = await b.peer.results.fetch("local", "r1")
        assert result is not None
        assert result.prompt_logprobs == _SCORES


async def test_prompt_logprobs_in_replays_and_under_a_new_epoch(demo: ServedModel) -> None:
    async with bench(demo) as b:
        job = b.job(sampling={"prompt_logprobs": 1})
        await b.dispatch(job)
        _score(b)
        await eventually(lambda: len(b.of()) == 3)
        b.frames.clear()
        await b.command(Replay(request_id="r1", from_index=1, reply="gw"))
        await eventually(lambda: b.kinds() == ["Started", "PromptLogprobs"])
        b.frames.clear()
        await b.dispatch(job, epoch=2, lease="$ACK.demo.2.1", resume_token_ids=(20,))
        await eventually(lambda: b.kinds() == ["Started", "PromptLogprobs"])
        assert all(frame.epoch == 2 for frame in b.of())


async def test_a_resumed_life_tells_them_again_but_not_the_logprobs_of_tokens(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        job = b.job(sampling={"prompt_logprobs": 1, "logprobs": 0}, store_result=True)
        await b.dispatch(job, resume_token_ids=(18, 19))
        score = TokenLogprob(20, -0.5)
        _score(b, logprobs=(score,), finish_reason=FinishReason.LENGTH)
        await b.ended()
        assert b.kinds() == ["Started", "PromptLogprobs", "Delta", "Usage", "Done"]
        assert b.deltas()[0].logprobs == (score,)
        result = await b.peer.results.fetch("local", "r1")
        assert result is not None
        assert (result.token_ids, result.logprobs) == ((18, 19, 20), ())
        assert result.prompt_logprobs == _SCORES


async def test_prompt_logprobs_are_made_again_even_if_all_tokens_are_there(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        sampling = {"prompt_logprobs": 1, "max_tokens": 2, "stop": ("zzz",), "min_tokens": 1}
        job = b.job(sampling=sampling, store_result=True)
        await b.dispatch(job, resume_token_ids=(18, 19))
        asked = b.engine.added["r1:1"]
        assert (asked.output_token_ids, asked.sampling.max_tokens) == ((), 1)
        assert asked.sampling.prompt_logprobs == 1
        _score(b, finish_reason=FinishReason.STOP)
        end = await b.ended()
        assert isinstance(end, Done)
        assert (end.finish_reason, end.num_tokens) == (FinishReason.LENGTH, 2)
        assert b.kinds() == ["Started", "PromptLogprobs", "Usage", "Done"]
        result = await b.peer.results.fetch("local", "r1")
        assert result is not None
        assert (result.token_ids, result.prompt_logprobs) == ((18, 19), _SCORES)
        assert result.text == _text(b, [18, 19])


async def test_logprobs_of_a_long_prompt_come_in_pieces(demo: ServedModel) -> None:
    num_tokens = 2 * MAX_PROMPT_LOGPROBS_PER_FRAME + 1
    scores = (None, *(TokenLogprob(number, -1.0) for number in range(1, num_tokens)))
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling={"prompt_logprobs": 0}))
        _score(b, prompt_logprobs=scores, finish_reason=FinishReason.LENGTH)
        await b.ended()
        pieces = [frame for frame in b.of() if isinstance(frame, PromptLogprobs)]
        assert [piece.index for piece in pieces] == [0, 512, 1024]
        assert sum((piece.logprobs for piece in pieces), ()) == scores
