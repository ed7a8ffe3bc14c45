"""The same body over HTTP and in a job: one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from millrace.bus import codec
from millrace.registry.served import ServedModel
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.control import ResumePoint
from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.frames import Delta, Done, Failed, FinishReason
from millrace.schemas.jobs import JobResult
from millrace.schemas.tools import ToolCall, ToolFormat
from tests.e2e.jobs.scribe_system import (
    AUTO,
    MODEL,
    TENANT,
    ScribeSystem,
    scribe_model,
    scribe_system,
    texts_of,
)
from tests.support.waiting import eventually

HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CUSTOM: Any = {"type": "custom", "custom": {"name": "poem"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
POEM = '<tool_call>\n{"name": "poem", "arguments": {"input": "a \\"b\\"\\nc"}}\n</tool_call>'
THOUGHTS = "<think>Let me see.</think>\n\n"


class Case(NamedTuple):
    """Text of the model, and the fields of the request besides its messages."""

    said: str
    fields: Any = None
    messages: Any = HI


CASES = {
    "text": Case("Hello."),
    "thoughts": Case(f"{THOUGHTS}Hello."),
    "thoughts that are not told": Case(f"{THOUGHTS}Hello.", {"include_reasoning": False}),
    "thoughts cut off": Case("<think>Let me", {"max_completion_tokens": 9}),
    "a call": Case(f"{THOUGHTS}Hm. {CALL}", {"tools": [TOOL]}),
    "two calls": Case(f"{CALL}\n{CALL}", {"tools": [TOOL]}),
    "a custom tool": Case(POEM, {"tools": [TOOL, CUSTOM]}),
    "a tool without a type": Case(CALL, {"tools": [{"function": TOOL["function"]}]}),
    "no tools": Case(CALL),
    "tool_choice none": Case(CALL, {"tools": [TOOL], "tool_choice": "none"}),
    "tool_choice required": Case(CALL, {"tools": [TOOL], "tool_choice": "required"}),
    "a named tool": Case(
        CALL,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    "allowed tools": Case(
        CALL,
        {
            "tools": [TOOL, CUSTOM],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        },
    ),
    "a call cut off by the length": Case(CALL, {"tools": [TOOL], "max_tokens": 40}),
    "a call cut off by a stop string": Case(CALL, {"tools": [TOOL], "stop": '"x'}),
    "a forced call cut off": Case(
        CALL, {"tools": [TOOL], "max_tokens": 12, "tool_choice": "required"}
    ),
    "what looks like a call": Case("<tool_call> no", {"tools": [TOOL]}),
    "blanks at the end": Case("Hello.  \n", {"tools": [TOOL]}),
    "a stop string": Case("Hello there.", {"stop": ["there"]}),
    "a stop token": Case("Hello there.", {"stop_token_ids": [18]}),
    "a left out tool": Case(CALL, {"tools": [TOOL, {"type": "web_search"}]}),
    "response_format": Case(
        '{"a": 1}',
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "object"}},
            }
        },
    ),
    "json_object": Case("{}", {"response_format": {"type": "json_object"}}),
    "guided_choice": Case("yes", {"guided_choice": ["yes", "no"]}),
    "structured_outputs": Case("ab", {"structured_outputs": {"regex": "[ab]+"}}),
    "prediction": Case("Hello.", {"prediction": {"type": "content", "content": "Hello."}}),
    "template": Case("Hello.", {"reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}),
    "stream": Case("Hello.", {"stream_options": None}),
    "a conversation with calls": Case(
        "It is x.",
        {"tools": [TOOL]},
        [
            *HI,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "x"},
        ],
    ),
    "parts of text": Case(
        "Hello.", None, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ),
    "a developer": Case("Hello.", None, [{"role": "developer", "content": "Be brief."}, *HI]),
}


def _told(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        (call["type"], call.get("function") or call.get("custom"))
        for call in message.get("tool_calls") or ()
    ]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": calls,
    }


def _told_by(result: JobResult) -> dict[str, Any]:
    called = msgspec.to_builtins(result.tool_calls)
    return {
        "content": result.text,
        "reasoning": result.reasoning,
        "calls": [(call["type"], call.get("function") or call["custom"]) for call in called],
    }


@pytest.mark.parametrize("packed", [False, True], ids=["json", "msgpack"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_a_chat_job_gets_the_answer_of_a_chat_request(
    scribe: ScribeSystem, case: Case, *, packed: bool
) -> None:
    scribe.script.text = case.said
    body = {"messages": case.messages, **(case.fields or {})}
    answer = await scribe.http.post("/v1/chat/completions", json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    result = await scribe.run_job(body, packed=packed)
    (choice,) = answer.json()["choices"]
    assert _told_by(result) == _told(choice["message"])
    assert (result.finish_reason, result.stop_reason) == (
        choice["finish_reason"],
        choice["stop_reason"],
    )
    usage = answer.json()["usage"]
    assert result.usage is not None
    assert result.usage.prompt_tokens == usage["prompt_tokens"]
    assert result.usage.completion_tokens == usage["completion_tokens"]
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    assert result.usage.reasoning_tokens == details["reasoning_tokens"]
    notices = msgspec.to_builtins(result.notices)
    assert list(notices) == answer.json().get("x-millrace-notice", [])
    over_http, in_job = scribe.script.requests[-2:]
    assert over_http.sampling.grammar == in_job.sampling.grammar
    assert over_http.prompt_token_ids == in_job.prompt_token_ids
    # The frames tell the same as the result.
    texts = texts_of(scribe.frames[result.request_id])
    assert (texts["content"], texts["reasoning"]) == (result.text, result.reasoning)
    assert [call["id"] for call in texts["calls"]] == [call.id for call in result.tool_calls]
    assert [(call["type"], call["name"], call["text"]) for call in texts["calls"]] == [
        (kind, called["name"], called.get("arguments", called.get("input")))
        for kind, called in _told_by(result)["calls"]
    ]
    done = scribe.frames[result.request_id][-1]
    assert isinstance(done, Done)
    assert done.finish_reason == result.finish_reason
    assert texts["num_tokens"] == done.num_tokens == len(result.token_ids)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
                }
            ]
        },
        "messages[0].content[0].type",
    ),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    "no messages": ({"messages": []}, "messages"),
    "a value": ({"temperature": 9}, "temperature"),
    "no number": ({"temperature": "hot"}, "temperature"),
    "a part of a number": ({"max_tokens": 4.5}, "max_tokens"),
    "two grammars": (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
    ),
    "an unknown tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    "a field of a tool": (
        {"tools": [{"type": "function", "function": {"name": "f", "colour": 1}}]},
        "tools[0].function.colour",
    ),
    "demands without tools": ({"tool_choice": "required"}, "tool_choice"),
    "template": ({"chat_template": "x"}, "chat_template"),
    "metadata": ({"metadata": {"k": "v" * 600}}, "metadata"),
    "audio": ({"modalities": ["audio"]}, "modalities"),
    "logprobs": ({"top_logprobs": 3}, "top_logprobs"),
    "too long": ({"max_completion_tokens": 5_000}, "messages"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_chat_job_gets_the_refusal_of_a_chat_request(
    scribe: ScribeSystem, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": HI} | fields
    answer = await scribe.http.post("/v1/chat/completions", json={"model": MODEL, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    result = await scribe.run_job(body)
    failed = scribe.frames[result.request_id][-1]
    assert isinstance(failed, Failed)
    if "max_tokens" not in fields:
        assert failed.message == error["message"]
    assert failed.code == error["code"]
    assert failed.param == error["param"] == param
    assert (result.error_code, result.error_param) == (failed.code, param)
    assert result.error_message == failed.message


BEYOND: dict[str, Any] = {
    "n": 2,
    "session_id": "s",
    "server_tools": ["clock"],
    "use_beam_search": True,
    "return_token_ids": True,
    "service_tier": "priority",
}


@pytest.mark.parametrize("name", BEYOND)
async def test_what_only_a_gateway_does_is_refused_by_name(scribe: ScribeSystem, name: str) -> None:
    result = await scribe.run_job({"messages": HI, name: BEYOND[name]})
    assert (result.error_code, result.error_param) == ("invalid_parameter", name)
    assert name in result.error_message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": [1, 2.5], "max_tokens": 3}, "prompt[1]"),
    ],
)
async def test_fields_that_completion_jobs_lack_are_refused_by_name(
    scribe: ScribeSystem, fields: dict[str, Any], param: str
) -> None:
    result = await scribe.run_job({"prompt": "hi", "temperature": 0.5} | fields)
    assert (result.error_code, result.error_param) == ("invalid_parameter", param)


@pytest.mark.parametrize("prompt", ["a mill", [10.0, 11, 12]])
async def test_a_completion_job_is_told_as_the_model_wrote_it(
    scribe: ScribeSystem, prompt: Any
) -> None:
    scribe.script.text = f"{THOUGHTS}Hello."
    result = await scribe.run_job({"prompt": prompt, "temperature": 0, "stop": None})
    assert (result.text, result.reasoning, result.tool_calls) == (scribe.script.text, "", ())
    assert scribe.script.requests[-1].sampling.max_tokens == 4_096 - len(
        scribe.script.requests[-1].prompt_token_ids
    )


async def test_a_trusted_job_may_bring_its_template(thinker: ServedModel) -> None:
    async with scribe_system(thinker, trusts_templates=True) as scribe:
        scribe.script.text = "Hello."
        body = {"messages": HI, "chat_template": "{{ messages[0].content }} you"}
        result = await scribe.run_job(body)
        assert (result.status, result.text) == ("done", "Hello.")
        prompt = scribe.script.requests[-1].prompt_token_ids
        assert thinker.tokenizer.decode(prompt) == "hi you"
        broken = await scribe.run_job(body | {"chat_template": "{% broken"})
        assert (broken.error_code, broken.error_param) == ("invalid_parameter", "chat_template")


async def test_stream_changes_nothing(scribe: ScribeSystem) -> None:
    scribe.script.text = CALL
    plain = await scribe.run_job({"messages": HI, "tools": [TOOL]})
    streamed = await scribe.run_job(
        {
            "messages": HI,
            "tools": [TOOL],
            "stream": True,
            "stream_options": {"include_usage": True},
            "prompt_logprobs": 0,
        }
    )
    assert _told_by(plain) == _told_by(streamed)
    assert streamed.finish_reason is FinishReason.TOOL_CALLS


async def test_the_nested_form_stays_as_the_model_wrote_it(scribe: ScribeSystem) -> None:
    scribe.script.text = f"{THOUGHTS}{CALL}"
    nested = {"name": "f", "parameters": PARAMETERS}
    for fields in ({"tools": [nested]}, {"tools": [nested], "sampling": {"temperature": 0}}):
        result = await scribe.run_job({"messages": HI, **fields})
        assert (result.text, result.finish_reason) == (scribe.script.text, FinishReason.STOP)
        assert (result.reasoning, result.tool_calls) == ("", ())
    mixed = await scribe.run_job({"messages": HI, "sampling": {}, "tool_choice": "none"})
    assert (mixed.error_code, mixed.error_param) == (MalformedMessageError.code, "tool_choice")


async def test_a_job_may_leave_the_model_open(scribe: ScribeSystem) -> None:
    scribe.script.text = CALL
    subject = f"jobs.{AUTO}.free.{TENANT}"
    body = {"messages": HI, "tools": [TOOL]}
    result = await scribe.run_job(body, model=AUTO, subject=subject)
    assert (result.model, len(result.tool_calls)) == (MODEL, 1)
    wrong = await scribe.run_job(body | {"temperature": 9}, model=AUTO, subject=subject)
    assert (wrong.error_code, wrong.error_param) == ("invalid_parameter", "temperature")
    other = await scribe.run_job(body, model="other")
    assert (other.error_code, other.error_param) == (MalformedMessageError.code, "model")


async def test_log_probabilities_are_with_their_tokens(scribe: ScribeSystem) -> None:
    scribe.script.text = f"{THOUGHTS}{CALL}"
    body = {"messages": HI, "tools": [TOOL], "logprobs": True, "top_logprobs": 1}
    result = await scribe.run_job(body)
    assert [one.token_id for one in result.logprobs] == list(result.token_ids)
    assert all(len(one.top) == 1 for one in result.logprobs)


async def test_what_a_job_says_of_itself_reaches_its_record(scribe: ScribeSystem) -> None:
    scribe.script.text = "Hello."
    fields = {"user": "u", "metadata": {"k": "v", "none": None}, "priority": 3.0}
    request_id = await scribe.publish({"messages": HI, **fields})
    await scribe.result(request_id)
    records = await _records(scribe)
    (record,) = [one for one in records if one.request_id == request_id]
    assert (record.user, record.metadata) == ("u", {"k": "v"})


async def _records(scribe: ScribeSystem) -> list[Any]:
    pulled: list[Any] = []

    async def has_some() -> bool:
        pulled.extend(await scribe.bus.outbox.pull(100, 0.0))
        return bool(pulled)

    await eventually(has_some)
    return [codec.RECORD.decode(message.payload) for message in pulled]


async def test_a_worker_that_dies_in_mid_call(scribe: ScribeSystem, thinker: ServedModel) -> None:
    """The job goes on from the tokens that its reader has, and is told as if nothing had
    happened."""
    scribe.script.text = f"{THOUGHTS}Hm. {CALL}"
    tokens = scribe.script.token_ids
    text = ""
    for number, token_id in enumerate(tokens):
        text += thinker.tokenizer.decode([token_id])
        if '"arguments": {"a"' in text:
            scribe.script.hold_at = number + 1
            break
    assert scribe.script.hold_at is not None
    request_id = await scribe.publish({"messages": HI, "tools": [TOOL]})

    def num_told() -> int:
        deltas = [one for one in scribe.frames.get(request_id, []) if isinstance(one, Delta)]
        return deltas[-1].index + len(deltas[-1].token_ids) if deltas else 0

    # The last token waits for what follows it.
    await eventually(lambda: num_told() == (scribe.script.hold_at or 0) - 1)

    def resume_point(asked: str) -> Any:
        assert asked == request_id
        return ResumePoint(token_ids=tuple(tokens[: num_told()]))

    await scribe.bus.control.serve_resume_points(TENANT, resume_point)
    scribe.start_worker()
    await scribe.lives[0].kill()
    scribe.script.hold_at = None
    result = await scribe.result(request_id)
    assert scribe.script.requests[-1].output_token_ids, "it began anew"
    texts = texts_of(scribe.frames[request_id])
    assert (texts["content"], texts["reasoning"]) == ("Hm.", "Let me see.")
    (call,) = texts["calls"]
    assert (call["name"], call["text"]) == ("f", '{"a": "x"}')
    assert _told_by(result) == {
        "content": "Hm.",
        "reasoning": "Let me see.",
        "calls": [("function", {"name": "f", "arguments": '{"a": "x"}'})],
    }
    assert [one.id for one in result.tool_calls] == [call["id"]]
    assert result.finish_reason is FinishReason.TOOL_CALLS


async def test_a_job_published_again_gets_the_same_frames(scribe: ScribeSystem) -> None:
    """The frames come from the worker's memory, and after its death from the stored result."""
    scribe.script.text = f"{THOUGHTS}Hm. {CALL}{POEM}"
    body = {"messages": HI, "tools": [TOOL, CUSTOM]}
    request_id = await scribe.publish(body)
    first = await scribe.ended(request_id)
    result = await scribe.result(request_id)
    before = texts_of(first)
    for life in scribe.lives:
        await life.kill()
    again: list[Any] = []
    await scribe.bus.frames.subscribe(f"{TENANT}/again", lambda _id, frame: again.append(frame))
    await scribe.publish(body, request_id=request_id, reply=f"{TENANT}/again")
    await eventually(lambda: any(isinstance(one, Done) for one in again))
    assert texts_of(again) == before
    assert again[-1].finish_reason is FinishReason.TOOL_CALLS
    # A reader that has the first tokens of a call is told the rest of it.
    for had in range(0, len(result.token_ids), 7):
        cut = [one for one in first if isinstance(one, Delta) and one.index < had]
        if cut and cut[-1].index + len(cut[-1].token_ids) <= had:
            assert texts_of([*cut, *again]) == before


TOOLS_OF_FORMATS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
            },
        },
    }
    for name in ("first-1", "second")
]
MADE = [
    ToolCall(id="", name="first-1", arguments='{"text": "Łódź, \\"<it>\\" (so)\\n", "number": 7}'),
    ToolCall(id="", name="second", arguments="{}"),
]


@pytest.mark.parametrize("tool_format", list(ToolFormat), ids=str)
async def test_calls_of_every_format(tmp_path: Path, tool_format: ToolFormat) -> None:
    async with scribe_system(scribe_model(tmp_path, tool_format)) as scribe:
        scribe.script.text = calls_as_text(MADE, tool_format)
        body = {"messages": HI, "tools": TOOLS_OF_FORMATS}
        answer = await scribe.http.post("/v1/chat/completions", json={"model": MODEL, **body})
        (choice,) = answer.json()["choices"]
        result = await scribe.run_job(body)
        assert len(result.tool_calls) == len(MADE)
        assert _told_by(result) == _told(choice["message"])
        assert texts_of(scribe.frames[result.request_id])["content"] == result.text
