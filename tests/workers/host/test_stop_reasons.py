"""Stop reason of a completion, for any attempt that reached it."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.registry.served import ServedModel
from millrace.schemas.frames import Done, FinishReason
from millrace.schemas.tools import ToolFormat
from tests.workers.scripted import EOS, bench

_TEXT = "go on, the END is near"


@pytest.mark.parametrize("includes", [False, True])
async def test_a_stop_string_is_told_after_any_number_of_tokens(
    demo: ServedModel, includes: bool
) -> None:
    tokens = demo.tokenizer.encode(_TEXT, False)
    sampling = {"stop": ("END", "never"), "include_stop_str_in_output": includes}
    for cut in range(len(tokens)):
        async with bench(demo) as b:
            job = b.job(sampling=sampling, store_result=True)
            await b.dispatch(job, resume_token_ids=tuple(tokens[:cut]))
            for token in tokens[cut:]:
                if b.worker.requests.num_running:
                    b.engine.emit("r1:1", [token])
            done = await b.ended()
            assert isinstance(done, Done)
            assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, "END")
            stored = await b.bus.results.fetch(job.tenant, job.request_id)
            assert stored is not None
            assert stored.stop_reason == "END"
            assert stored.text == ("go on, the END" if includes else "go on, the ")


@pytest.mark.parametrize("has", [0, 1, 2])
@pytest.mark.parametrize(
    ("last", "reason", "stop_reason"),
    [
        (21, FinishReason.STOP, 21),
        (EOS, FinishReason.STOP, None),
        (22, FinishReason.LENGTH, None),
    ],
)
async def test_a_stop_token_is_told_but_no_end_of_sequence(
    demo: ServedModel, has: int, last: int, reason: FinishReason, stop_reason: int | None
) -> None:
    sampling: dict[str, Any] = {"stop_token_ids": (21,), "max_tokens": 2}
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling=sampling), resume_token_ids=(20, last)[:has])
        if has == 0:
            b.engine.emit("r1:1", [20])
        if has < 2:
            b.engine.emit("r1:1", [last], reason)
        done = await b.ended()
    assert isinstance(done, Done)
    assert (done.finish_reason, done.stop_reason) == (reason, stop_reason)


@pytest.mark.parametrize(
    ("sampling", "is_watched"),
    [({"stop": ("END",)}, True), ({"one_call": ToolFormat.HERMES}, True), ({}, False)],
)
async def test_an_engine_holds_no_token_of_a_request_that_its_text_may_stop(
    demo: ServedModel, sampling: dict[str, Any], is_watched: bool
) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling=sampling))
        assert b.engine.added["r1:1"].watched == is_watched


@pytest.mark.parametrize("has", [0, 4])
async def test_a_completion_of_one_call_ends_behind_it(demo: ServedModel, has: int) -> None:
    call = '<tool_call>\n{"name": "a", "arguments": {"x": "}</tool_call>"}}'
    token_ids = demo.tokenizer.encode(f"{call}\n</tool_call>\n<tool_call>\n{{", False)
    sampling: dict[str, Any] = {"one_call": ToolFormat.HERMES, "max_tokens": 200, "stop": ("{{",)}
    async with bench(demo) as b:
        job = b.job(sampling=sampling, store_result=True)
        await b.dispatch(job, resume_token_ids=tuple(token_ids[:has]))
        for token_id in token_ids[has:]:
            b.engine.emit("r1:1", [token_id])
        done = await b.ended()
        assert isinstance(done, Done)
        assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, None)
        stored = await b.bus.results.fetch(job.tenant, job.request_id)
    assert stored is not None
    assert stored.usage is not None
    assert stored.text == call
    assert stored.usage.completion_tokens == len(stored.token_ids) < len(token_ids)
