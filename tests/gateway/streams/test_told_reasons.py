"""Finish reasons in a worker's record, against those that the gateway tells its client."""

from __future__ import annotations

import pytest

from millrace.gateway.streams.choice import Choice, ToldTools
from millrace.gateway.streams.stream import NULL_CLIENT, OpenStream, TokenGaps
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.chat.asked import Asked
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.frames import Delta, Done, FinishReason, Usage
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tools import ToolCall, ToolDefinition, ToolFormat
from millrace.workers.host.generations.chat_answer import ChatAnswer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = tuple(ToolDefinition(name=name, parameters=PARAMETERS) for name in ("f", "poem"))
CALLS = [
    ToolCall(id="", name="f", arguments='{"a": "Łódź \\"x\\"", "n": 7}'),
    ToolCall(id="", name="poem", arguments='{"a": "b", "n": 1}'),
]
_STOP, _LENGTH = FinishReason.STOP, FinishReason.LENGTH


def told(job: Job, text: str, end: FinishReason, stop: str | None, form: ToolFormat) -> list[str]:
    """The reason that the gateway tells, then the names of the calls that it shows."""
    stream = OpenStream(job, NULL_CLIENT, 0.0)
    stream.feed(Delta(epoch=1, index=0, token_ids=(7,), text=text), 0.0)
    stream.feed(Usage(epoch=1, completion_tokens=1), 0.0)
    stream.feed(Done(epoch=1, finish_reason=end, stop_reason=stop, num_tokens=1), 0.0)
    must_call = job.asked is not None and job.asked.must_call
    choice = Choice(0, stream, form, ToldTools(TOOLS), must_call=must_call)
    choice.collect(0.0, TokenGaps(), [])
    return [choice.reason, *(call.name for call in choice.client_calls)]


def recorded(
    job: Job, text: str, end: FinishReason, stop: str | None, form: ToolFormat
) -> list[str]:
    """The same as the worker's record has them."""
    answer = ChatAnswer.read_by_gateway(job, form)
    answer.read([text])
    answer.finish(end, stop)
    return [answer.finish_reason(end).value, *answer.called_names]


@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("tool_format", ToolFormat)
def test_recorded_reasons_match_every_tool_format_and_every_cut(
    tool_format: ToolFormat, thinks: bool, must_call: bool
) -> None:
    sampling = SamplingOptions(reasoning=ReasoningFormat()) if thinks else SamplingOptions()
    job = Job(
        request_id="r1",
        model="m",
        prompt_token_ids=(1,),
        sampling=sampling,
        asked=Asked(reads_calls=True, must_call=must_call),
    )
    calls = ("<think>Hm.</think>" if thinks else "") + str(calls_as_text(CALLS, tool_format))
    whole = recorded(job, calls, _STOP, None, tool_format)
    assert whole == ["tool_calls", "f", "poem"]
    assert recorded(job, "No call.", _STOP, None, tool_format)[0] == "stop"
    texts = ["", "No call.", '{"a": 1}', *(calls[:length] for length in range(1, len(calls), 3))]
    for text in texts:
        for end, stop in ((_STOP, None), (_LENGTH, None), (_STOP, "</s>")):
            expected = told(job, text, end, stop, tool_format)
            assert recorded(job, text, end, stop, tool_format) == expected, (text, end, stop)
