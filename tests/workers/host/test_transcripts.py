"""Transcripts of tenants that asked for them, in records of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import pytest

from millrace.bus.codec import RECORD
from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel
from millrace.schemas.frames import FinishReason
from millrace.schemas.pooling import Pooling
from millrace.schemas.records import TranscriptRecord, WorkerSample
from tests.workers.scripted import GATEWAY, Bench, bench

_PROMPT, _ANSWER = "xylophone marmalade", "zeppelin quicksand"


async def _serve(b: Bench, *, keep: bool, finish: bool = True) -> None:
    """Serve one request with the prompt and the answer of this module, to its end."""
    prompt = b.model.tokenizer.encode(_PROMPT, False)
    answer = b.model.tokenizer.encode(_ANSWER, False)
    job = b.job(
        prompt_token_ids=tuple(prompt),
        sampling={"max_tokens": 64},
        keep_transcript=keep,
        tenant="t",
    )
    await b.dispatch(job)
    b.engine.emit("r1:1", answer, FinishReason.LENGTH if finish else None)
    if not finish:
        await b.command(Cancel(request_id="r1"))
    await b.ended()


async def _stored(b: Bench) -> list[bytes]:
    return [message.payload for message in await b.peer.outbox.pull(1000, 0.0)]


def _transcripts(payloads: list[bytes]) -> list[TranscriptRecord]:
    records = [RECORD.decode(payload) for payload in payloads]
    return [record for record in records if isinstance(record, TranscriptRecord)]


async def test_prompt_and_answer_are_kept_word_for_word_if_the_job_says_so(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await _serve(b, keep=True)
        (transcript,) = _transcripts(await _stored(b))
        assert transcript == TranscriptRecord(
            request_id="r1",
            tenant="t",
            model="demo",
            prompt=_PROMPT,
            completion=_ANSWER,
            done_ns=b.clock.now_ns(),
        )


async def test_no_words_are_anywhere_else(
    demo: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """No text leaves a worker except in the client's own frames; the dispatch that came is not
    counted."""
    caplog.set_level(logging.DEBUG)
    async with bench(demo, sample_interval_s=0.5, drain_timeout_s=0.5) as b:
        left: list[tuple[str, bytes]] = []
        b.broker.subscribe(">", lambda message: left.append((message.subject, message.payload)))
        await _serve(b, keep=False)
        await b.settle(2.0)
        await b.stop()
        stored = await _stored(b)
        assert len(stored) > 2, "a record, and samples"
        assert not _transcripts(stored)
        others = [payload for subject, payload in left if not subject.startswith(f"tok.{GATEWAY}")]
        assert others
        frames = [payload for subject, payload in left if subject.startswith(f"tok.{GATEWAY}")]
        for word in (*_PROMPT.split(), *_ANSWER.split()):
            assert not any(word.encode() in payload for payload in (*stored, *others))
            assert word not in caplog.text
        assert any(_ANSWER.split()[0].encode() in payload for payload in frames)


@pytest.mark.parametrize("why", ["cancelled", "failed", "embedding"])
async def test_what_was_not_answered_with_words_has_no_transcript(
    demo: ServedModel, why: str
) -> None:
    async with bench(demo) as b:
        if why == "cancelled":
            await _serve(b, keep=True, finish=False)
        else:
            pooling = Pooling.MEAN if why == "embedding" else None
            await b.dispatch(b.job(keep_transcript=True, pooling=pooling))
            ends: dict[str, Callable[[], EngineOutput]] = {
                "failed": lambda: EngineOutput(request_id="r1:1", error=("code", "no")),
                "embedding": lambda: EngineOutput(
                    request_id="r1:1", embedding=(0.5,), finish_reason=FinishReason.STOP
                ),
            }
            b.engine.step(msgspec.structs.replace(ends[why](), started=True))
            await b.ended()
        stored = await _stored(b)
        assert stored
        assert not _transcripts(stored)


async def test_a_transcript_that_the_bus_does_not_take_costs_no_record(
    demo: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(demo) as b:
        token = demo.tokenizer.encode(_ANSWER, False)[0]
        await b.dispatch(b.job(keep_transcript=True, sampling={"max_tokens": 4000}))
        b.broker.max_payload_bytes = 3_000
        b.engine.emit("r1:1", [token] * 3000, FinishReason.LENGTH)
        await b.settle(0.1)
        assert b.worker.requests.num_ending == 0
        b.broker.max_payload_bytes = 1 << 20
        stored = await _stored(b)
        assert not _transcripts(stored)
        kinds = {type(RECORD.decode(payload)) for payload in stored} - {WorkerSample}
        assert len(kinds) == 1
        assert "too large to be stored" in caplog.text
