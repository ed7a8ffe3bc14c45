"""Beam search on a worker's bus side: no output until its end, then all answers, one end, one
record; a search starts again from the prompt after its engine died."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from millrace.bus.frame_reader import StreamReader
from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, Replay
from millrace.schemas.frames import Beam, BeamEnd, Cancelled, Done, Failed, FinishReason, Usage
from millrace.schemas.jobs import Job
from millrace.schemas.records import Status
from millrace.workers.host.endings.records import smaller_results
from millrace.workers.host.generations.beam_answers import MAX_TOKENS_PER_BEAM_FRAME
from tests.support.waiting import eventually
from tests.workers.scripted import EOS, Bench, bench

_TEXTS = ("naïve café 你好", "second best", "third")
_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP)


def beam_job(b: Bench, **changes: Any) -> Job:
    sampling = {"use_beam_search": True, "n": 3, "stop_token_ids": (21,)}
    return b.job(sampling=sampling, store_result=True, **changes)


def tokens_of(model: ServedModel) -> list[tuple[int, ...]]:
    """Return the tokens of three answers: the first ends in an end of sequence, the third in a stop
    token."""
    first, second, third = (tuple(model.tokenizer.encode(text, False)) for text in _TEXTS)
    return [(*first, EOS), second, (*third, 21)]


def outputs_of(
    engine_id: str, answers: Sequence[tuple[int, ...]], reasons: Sequence[FinishReason] = _REASONS
) -> list[EngineOutput]:
    return [
        EngineOutput(
            request_id=engine_id,
            choice=choice,
            token_ids=token_ids,
            finish_reason=reason,
            cumulative_logprob=-1.5 - choice,
            device_us=4000.0 if choice == 0 else 0.0,
        )
        for choice, (token_ids, reason) in enumerate(zip(answers, reasons, strict=True))
    ]


def begin(b: Bench, engine_id: str = "r1:1") -> None:
    """Report a search's admission and its first tokens."""
    b.engine.step(EngineOutput(request_id=engine_id, started=True, num_cached_tokens=2))
    b.engine.step(EngineOutput(request_id=engine_id))


async def test_answers_come_at_the_end_with_one_record_and_one_result(demo: ServedModel) -> None:
    answers = tokens_of(demo)
    async with bench(demo) as b:
        await b.dispatch(beam_job(b))
        [asked] = b.engine.added.values()
        assert (asked.sampling.use_beam_search, asked.sampling.n) == (True, 3)
        begin(b)
        await b.settle(0.05)
        assert b.kinds() == ["Started"]
        b.engine.step(*outputs_of("r1:1", answers))
        done = await b.ended()
        assert b.kinds() == ["Started", "Beam", "Beam", "Beam", "Usage", "Done"]
        beams = [frame for frame in b.of() if isinstance(frame, Beam)]
        assert [beam.text for beam in beams] == list(_TEXTS)
        assert [beam.token_ids for beam in beams] == answers
        assert isinstance(done, Done)
        assert (done.finish_reason, done.num_tokens, done.stop_reason) == (_REASONS[0], 0, None)
        assert done.beams == tuple(
            BeamEnd(
                num_tokens=len(tokens),
                finish_reason=reason,
                stop_reason=21 if tokens[-1] == 21 else None,
                cumulative_logprob=-1.5 - number,
            )
            for number, (tokens, reason) in enumerate(zip(answers, _REASONS, strict=True))
        )
        num_tokens = sum(map(len, answers))
        usage = next(frame for frame in b.of() if isinstance(frame, Usage))
        assert (usage.prompt_tokens, usage.cached_tokens) == (3, 2)
        assert usage.completion_tokens == num_tokens
        [record] = await b.records()
        assert (record.status, record.completion_tokens) == (Status.DONE, num_tokens)
        assert (record.device_us, record.cost_method) == (4000, "steps")
        stored = await b.bus.results.fetch("local", "r1")
        assert stored is not None
        assert (stored.text, stored.token_ids) == ("", ())
        assert [beam.text for beam in stored.beams] == list(_TEXTS)
        assert [beam.token_ids for beam in stored.beams] == answers
        assert stored.usage is not None
        assert stored.usage.completion_tokens == num_tokens
        assert await b.num_queued() == 0


async def test_a_reader_that_missed_all_of_it_has_it_sent_again(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(beam_job(b))
        begin(b)
        b.engine.step(*outputs_of("r1:1", tokens_of(demo)))
        await b.ended()
        await b.peer.frames.subscribe("other", b.on_frame)
        b.frames.clear()
        await b.command(Replay(request_id="r1", from_index=0, reply="other"))
        await eventually(lambda: len(b.of()) == 6)
        reader = StreamReader()
        for frame in reversed(b.of()):  # overtaken by one another
            reader.feed(frame)
        for frame in b.of():
            reader.feed(frame)
        assert [beam.text for beam in reader.beams] == list(_TEXTS)
        assert isinstance(reader.terminal, Done)


async def test_long_answers_are_sent_in_parts(demo: ServedModel) -> None:
    letter = demo.tokenizer.encode("a", False)[0]
    answers = [(letter,) * (2 * MAX_TOKENS_PER_BEAM_FRAME + 5), (letter,), (letter,) * 3]
    async with bench(demo) as b:
        await b.dispatch(beam_job(b))
        begin(b)
        b.engine.step(*outputs_of("r1:1", answers))
        await b.ended()
        parts = [frame for frame in b.of() if isinstance(frame, Beam)]
        assert [(part.beam, part.index, len(part.token_ids)) for part in parts] == [
            (0, 0, MAX_TOKENS_PER_BEAM_FRAME),
            (0, MAX_TOKENS_PER_BEAM_FRAME, MAX_TOKENS_PER_BEAM_FRAME),
            (0, 2 * MAX_TOKENS_PER_BEAM_FRAME, 5),
            (1, 0, 1),
            (2, 0, 3),
        ]
        reader = StreamReader()
        for frame in [*b.of()[:3], *b.of()[2:]]:  # one came twice
            reader.feed(frame)
        assert [beam.text for beam in reader.beams] == ["a" * len(tokens) for tokens in answers]


async def test_a_search_starts_anew_in_the_next_engine(demo: ServedModel) -> None:
    """Answers that the lost engine had already given do not count."""
    async with bench(demo) as b:
        await b.dispatch(beam_job(b))
        await b.dispatch(b.job("r2"))
        begin(b)
        b.engine.step(*outputs_of("r1:1", tokens_of(demo))[:2])
        former = b.engine
        former.fail("killed")
        await eventually(lambda: b.engine is not former and bool(b.engine.added))
        # One after the other, each until it has got past its first token.
        assert len(b.engine.added) == 1
        if "r2:1" in b.engine.added:
            b.engine.emit("r2:1", [20])
        again = b.engine.added["r1:1"]
        assert again.output_token_ids == ()
        begin(b)
        assert set(b.engine.added) >= {"r1:1", "r2:1"}
        b.engine.step(*outputs_of("r1:1", tokens_of(demo)))
        await b.ended()
        beams = [frame for frame in b.of() if isinstance(frame, Beam)]
        assert [beam.text for beam in beams] == list(_TEXTS)
        b.engine.emit("r2:1", [20, 22], FinishReason.LENGTH)
        await b.ended("r2")
        records = [record for record in await b.records() if record.request_id == "r1"]
        assert [record.status for record in records] == [Status.DONE]


async def test_a_search_that_fails_ends_once(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(beam_job(b))
        begin(b)
        b.engine.step(
            *(
                EngineOutput(request_id="r1:1", choice=choice, error=("internal_error", "broken"))
                for choice in range(3)
            )
        )
        end = await b.ended()
        assert isinstance(end, Failed)
        assert b.kinds() == ["Started", "Usage", "Failed"]
        [record] = await b.records()
        assert (record.status, record.completion_tokens) == (Status.FAILED, 0)


async def test_a_cancelled_search_has_no_answer(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(beam_job(b))
        begin(b)
        await b.command(Cancel(request_id="r1"))
        assert b.engine.cancelled == ["r1:1"]
        b.engine.step(*outputs_of("r1:1", tokens_of(demo)))  # they crossed
        assert isinstance(await b.ended(), Cancelled)
        assert b.kinds() == ["Started", "Usage", "Cancelled"]
        [record] = await b.records()
        assert (record.status, record.completion_tokens) == (Status.CANCELLED, 0)


async def test_no_search_goes_on_behind_tokens(demo: ServedModel) -> None:
    async with bench(demo) as b:
        reply = await b.dispatch(beam_job(b), resume_token_ids=(20,))
        assert (reply.ok, reply.reason) == (False, "bad_request")


async def test_stop_tokens_are_text_if_they_are_asked_for(demo: ServedModel) -> None:
    letter = demo.tokenizer.encode("a", False)[0]
    sampling = {
        "use_beam_search": True,
        "n": 1,
        "stop_token_ids": (letter,),
        "include_stop_str_in_output": True,
    }
    tokens = (*demo.tokenizer.encode("bb", False), letter)
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling=sampling))
        begin(b)
        b.engine.step(*outputs_of("r1:1", [tokens], [FinishReason.STOP]))
        done = await b.ended()
        [beam] = [frame for frame in b.of() if isinstance(frame, Beam)]
        assert beam.text == "bba"
        assert isinstance(done, Done)
        assert done.stop_reason == letter


async def test_a_result_that_is_too_large_keeps_its_texts_as_long_as_it_can(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await b.dispatch(beam_job(b))
        begin(b)
        b.engine.step(*outputs_of("r1:1", tokens_of(demo)))
        await b.ended()
        stored = await b.bus.results.fetch("local", "r1")
        assert stored is not None
        whole, without_ids, failed = smaller_results(stored, "too large")
        assert whole.beams == stored.beams
        assert [(beam.text, beam.token_ids) for beam in without_ids.beams] == [
            (text, ()) for text in _TEXTS
        ]
        assert [beam.num_tokens for beam in without_ids.beams] == [
            len(tokens) for tokens in tokens_of(demo)
        ]
        assert (failed.beams, failed.status) == ((), Status.FAILED.value)


@pytest.mark.parametrize("keep", [True, False])
async def test_a_transcript_has_the_best_answer(demo: ServedModel, keep: bool) -> None:
    async with bench(demo) as b:
        await b.dispatch(beam_job(b, keep_transcript=keep))
        begin(b)
        b.engine.step(*outputs_of("r1:1", tokens_of(demo)))
        await b.ended()
        pulled = await b.peer.outbox.pull(1000, 0.0)
        kept = [_TEXTS[0].encode() in message.payload for message in pulled]
        assert any(kept) == keep
