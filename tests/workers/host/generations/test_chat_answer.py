"""Chat answers of a worker: the same parts however their tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.frames import Delta, FinishReason
from millrace.schemas.jobs import AnswerForm, Job
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tools import ToolCall, ToolDefinition, ToolFormat
from millrace.workers.host.endings.records import smaller_results
from millrace.workers.host.generations.chat_answer import ChatAnswer
from millrace.workers.host.generations.state import STOPPED
from tests.e2e.jobs.scribe_system import scribe_model, texts_of
from tests.workers.scripted import Bench, bench

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = tuple(ToolDefinition(name=name, parameters=PARAMETERS) for name in ("f", "poem"))
CALLS = [
    ToolCall(id="", name="f", arguments='{"a": "Łódź \\"x\\"", "n": 7}'),
    ToolCall(id="", name="poem", arguments='{"input": "a\\nb"}'),
]
FORM = AnswerForm(tools=TOOLS, freeform=("poem",))
THINKS = SamplingOptions(reasoning=ReasoningFormat())


def answer_of(tool_format: ToolFormat, form: AnswerForm = FORM) -> ChatAnswer:
    job = Job(request_id="r1", model="m", prompt_token_ids=(1,), sampling=THINKS)
    return ChatAnswer(form, job, tool_format)


def deltas_between(answer: ChatAnswer, cuts: Sequence[int]) -> list[Delta]:
    """Return the deltas of the tokens between the cuts."""
    return [
        Delta(index=start, token_ids=(0,) * (end - start), **answer.delta_fields(start, end))
        for start, end in pairwise(cuts)
        if end > start
    ]


def pieces_of(text: str, lengths: Sequence[int]) -> list[str]:
    """Cut the text into pieces of these lengths, over and over; a piece may be empty."""
    pieces: list[str] = []
    at = number = 0
    while at < len(text):
        length = lengths[number % len(lengths)]
        pieces.append(text[at : at + length])
        at, number = at + length, number + 1
    return pieces


@given(
    tool_format=st.sampled_from(list(ToolFormat)),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    had=st.integers(0, 200),
    num_chars_cut=st.integers(0, 30),
    is_finished_apart=st.booleans(),
)
def test_parts_do_not_depend_on_how_tokens_come(
    *,
    tool_format: ToolFormat,
    lengths: list[int],
    cuts: list[int],
    had: int,
    num_chars_cut: int,
    is_finished_apart: bool,
) -> None:
    says = "" if tool_format in (ToolFormat.LLAMA3, ToolFormat.PYTHONIC) else "Hm. "
    text = f"<think>\nSo.</think>\n{says}{calls_as_text(CALLS, tool_format)}"
    text = text[: len(text) - num_chars_cut]
    reason = FinishReason.LENGTH if num_chars_cut else FinishReason.STOP
    pieces = pieces_of(text, lengths)
    whole = answer_of(tool_format)
    whole.read(pieces)
    whole.finish(reason, None)
    result = whole.result_fields()
    # Told in deltas that were cut anywhere, while the answer grew.
    num_tokens = len(pieces)
    places = sorted({0, num_tokens, *(cut for cut in cuts if cut < num_tokens)})
    growing = answer_of(tool_format)
    deltas: list[Delta] = []
    num_told = 0
    for place in places[1:]:
        growing.read(pieces[:place])
        if place == num_tokens and not is_finished_apart:
            growing.finish(reason, None)
        certain = place if growing.is_certain else place - 1
        deltas += deltas_between(growing, (num_told, certain))
        num_told = max(num_told, certain)
    growing.finish(reason, None)
    deltas += deltas_between(growing, (num_told, num_tokens))
    expected = texts_of(deltas_between(whole, (0, num_tokens)))
    assert texts_of(deltas) == expected
    assert growing.finish_reason(reason) == whole.finish_reason(reason)
    # Another worker goes on from any token, and says the same under the same ids.
    had = min(had, num_tokens)
    other = answer_of(tool_format)
    other.read(pieces[:had])
    other.read(pieces)
    other.finish(reason, None)
    begun = deltas_between(whole, (0, had // 2, had))
    assert texts_of([*begun, *deltas_between(other, (had // 3, num_tokens))]) == expected
    assert (expected["content"], expected["reasoning"]) == (result["text"], result["reasoning"])
    assert [call["text"] for call in expected["calls"]] == [
        _text_of(call) for call in result["tool_calls"]
    ]
    if not num_chars_cut:
        assert [call["name"] for call in expected["calls"]] == ["f", "poem"]
        assert expected["reasoning"] == "So."
        assert whole.finish_reason(reason) is FinishReason.TOOL_CALLS


def _text_of(call: Any) -> str:
    return str(call.function.arguments if call.function else call.custom.input)


def test_thoughts_may_be_left_out() -> None:
    answer = answer_of(ToolFormat.HERMES, AnswerForm(include_reasoning=False))
    answer.read(["<think>", "So.", "</think>", "Yes."])
    answer.finish(FinishReason.STOP, None)
    (delta,) = deltas_between(answer, (0, 4))
    assert (delta.reasoning, delta.reasoning_ends, delta.text) == ("", (), "Yes.")
    assert answer.result_fields()["reasoning"] == ""


def test_an_answer_that_did_not_end_well_has_called_nothing() -> None:
    answer = answer_of(ToolFormat.HERMES)
    answer.read(["<think></think>", '<tool_call>{"name": "f", "arguments": {'])
    answer.finish(None, None)
    assert [call.function.name for call in answer.result_fields()["tool_calls"]] == ["f"]


async def test_a_result_that_is_too_large_keeps_its_parts(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The result loses its log-probabilities first, then the places where tokens end, at last its
    texts."""
    async with bench(scribe_model(tmp_path_factory.mktemp("model"))) as one:
        result = await _result(one)
        assert (result.text, len(result.tool_calls)) == ("Hm.", 1)
        first, second, last = smaller_results(result, "too large")
        assert first.tool_call_ends == result.tool_call_ends
        assert (second.tool_call_ends, second.text_ends, second.token_ids) == ((), (), ())
        assert (second.tool_calls, second.text) == (result.tool_calls, "Hm.")
        assert (last.tool_calls, last.text, last.status) == ((), "", "failed")


async def _result(one: Bench) -> Any:
    text = 'Hm. <tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
    token_ids = one.model.tokenizer.encode(text, add_special_tokens=False)
    job = one.job(answer=FORM, store_result=True, sampling={"max_tokens": 100})
    await one.dispatch(job)
    (engine_id,) = one.engine.added
    for token_id in token_ids:
        one.engine.emit(engine_id, (token_id,))
        await one.settle(0.02)
    # The engine may say the end without a token: nothing that was held back is lost.
    one.engine.emit(engine_id, (), STOPPED.finish_reason)
    await one.settle(0.1)
    await one.ended()
    read = texts_of(one.of())
    assert (read["content"], read["num_tokens"]) == ("Hm.", len(token_ids))
    assert [call["text"] for call in read["calls"]] == ['{"a": "x"}']
    result = await one.peer.results.fetch(job.tenant, job.request_id)
    assert result is not None
    return result
