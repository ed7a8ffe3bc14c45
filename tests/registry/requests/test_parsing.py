"""Parsing of requests: fields are honoured or refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.message_fields import in_words, respelled
from millrace.registry.requests.parsing import parse_chat, parse_completion, parse_generate
from millrace.schemas.chat.messages import Message
from millrace.schemas.errors import InvalidJsonError, ParameterError
from millrace.schemas.jobs import ChatMessage, Tier
from millrace.schemas.openai import ChatCompletionRequest, CompletionRequest
from millrace.schemas.tools import ToolCall
from millrace.schemas.websocket import Generate

_CHAT = msgspec.json.Decoder(ChatCompletionRequest)
_TEXT = msgspec.json.Decoder(CompletionRequest)
CALLS = [
    {
        "index": 0,
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
        "provider_specific_fields": None,
    }
]


def chat(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(decode(_CHAT, msgspec.json.encode(body)))


def text(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "prompt": "hi"} | fields
    return parse_completion(decode(_TEXT, msgspec.json.encode(body)))


def test_sampling_is_taken_over() -> None:
    request = chat(
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=3,
        stop="x",
        stop_token_ids=[7],
        ignore_eos=True,
        user="u",
        session_id="s",
        service_tier="flex",
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (40, 0.1, 3)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("x",), (7,), True)
    assert (request.user, request.session_id, request.tier) == ("u", "s", Tier.BATCH)


def test_what_edits_the_logits_is_taken_over() -> None:
    request = chat(
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"5": -100, "17": 2.5},
        typical_p=0.9,
        min_tokens=4,
        bad_words=["mill", "race"],
    )
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    assert (sampling.repetition_penalty, sampling.typical_p) == (1.2, 0.9)
    assert sampling.logit_bias == {5: -100, 17: 2.5}
    assert (sampling.min_tokens, sampling.bad_words) == (4, ("mill", "race"))
    assert text(logit_bias={"5": 1}).sampling.logit_bias == {5: 1}


def test_messages_may_hold_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(
        messages=[{"role": "developer", "content": "rules"}, {"role": "user", "content": parts}]
    )
    assert request.messages == (ChatMessage("system", "rules"), ChatMessage("user", "ab"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ("hi", None)),
        (["hi"], ("hi", None)),
        ([1, 2], (None, (1, 2))),
        ([[1, 2]], (None, (1, 2))),
    ],
)
def test_prompts_come_in_four_shapes(prompt: Any, expected: Any) -> None:
    request = text(prompt=prompt)
    assert (request.prompt, request.prompt_token_ids) == expected
    assert request.sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (["a"] * 65, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (7, "prompt"),
        (None, "prompt"),
        ([1, "a"], "prompt[1]"),
        ([1, 2, 3.5], "prompt[2]"),
        ([True], "prompt[0]"),
        ({"a": 1}, "prompt"),
        (["a", 5], "prompt[1]"),
        (["a", None], "prompt[1]"),
        ([[1, 2], [3, "b"]], "prompt[1][1]"),
        (["a", ["b"]], "prompt[1][0]"),
        ([[1], [[2]]], "prompt[1][0]"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        text(prompt=prompt)
    assert caught.value.param == param
    assert caught.value.message.startswith(param) or "At most" in caught.value.message


def test_what_a_model_refuses_is_named_as_it_was_sent() -> None:
    words = chat(logprobs=True, top_logprobs=3, max_completion_tokens=4).words
    error = respelled(ParameterError("max_tokens", "leave max_tokens out"), words)
    assert error.param == "max_completion_tokens"
    assert error.message == "leave max_completion_tokens out"
    assert in_words("logprobs", words) == "top_logprobs"
    assert in_words("max_reasoning_tokens", words) == "thinking_token_budget"
    others = chat(logprobs=True, max_tokens=4).words
    assert in_words("logprobs max_tokens", others) == "logprobs max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"stream_reasoning": False}, "stream_reasoning"),
        ({"no_stop_trim": True, "include_stop_str_in_output": False}, "no_stop_trim"),
    ],
)
def test_refusals_name_the_field_that_was_sent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"logit_bias": {}, "logprobs": False, "tools": [], "metadata": {}},
        {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"]},
        {"store": False, "audio": None, "parallel_tool_calls": True, "top_k": -1},
        {"store": True, "verbosity": "low", "reasoning_effort": "minimal"},
        {"prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "u"},
    ],
)
def test_values_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 17),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"5": None}),
        ("logit_bias", [5]),
        ("typical_p", 0),
        ("min_tokens", -1),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("logprobs", 3),
        ("top_logprobs", 3),
        ("session_keep", 1),
        ("tool_choice", "required"),
        ("response_format", "json"),
        ("modalities", ["audio"]),
        ("metadata", {"a": "b" * 513}),
        ("metadata", {str(number): "b" for number in range(17)}),
        ("store", "yes"),
        ("reasoning_effort", 3),
        ("prompt_cache_key", ["a"]),
        ("safety_identifier", "u" * 300),
        ("verbosity", {}),
        ("temperature", 3),
        ("temperature", "warm"),
        ("top_p", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("seed", -(2**63)),
        ("seed", 10**30),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("service_tier", "gold"),
        ("user", "u" * 300),
        ("model", 3),
        ("messages", []),
        ("messages", "hi"),
        ("frobnicate", 1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        chat(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


def test_what_sdks_add_to_answers_that_are_sent_back_is_ignored() -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": CALLS,
        "id": "m1",
        "parsed": {"a": 1},
        "refusal": "no",
        "annotations": [{"type": "url_citation"}],
        "audio": {"id": "a1"},
        "function_call": {"name": "f", "arguments": "{}"},
        "provider_specific_fields": {"refusal": None},
        "reasoning_content": "Hm.",
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
    }
    result = {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f", "is_error": False}
    messages = [{"role": "user", "content": "hi"}, answer, result]
    assert chat(messages=messages).messages == (
        ChatMessage("user", "hi"),
        ChatMessage(
            "assistant",
            "",
            tool_calls=(ToolCall(id="c", name="f", arguments="{}"),),
            reasoning="Hm.",
        ),
        ChatMessage("tool", "1", name="f", tool_call_id="c"),
    )


REFUSAL = {"type": "refusal", "refusal": "I can't."}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None, "refusal": "I can't."}, "I can't."),
        ({"role": "assistant", "refusal": "I can't."}, "I can't."),
        ({"role": "assistant", "content": "", "refusal": "I can't."}, "I can't."),
        ({"role": "assistant", "content": "No.", "refusal": "I can't."}, "No."),
        ({"role": "assistant", "content": [REFUSAL]}, "I can't."),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "Sorry. "}, REFUSAL]},
            "Sorry. I can't.",
        ),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "assistant", "content": None, "tool_calls": None, "function_call": None}, ""),
        ({"role": "assistant", "content": []}, ""),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, ""),
        ({"role": "tool", "tool_call_id": "c"}, ""),
        ({"role": "tool", "content": [], "tool_call_id": "c"}, ""),
    ],
)
def test_turns_without_text_go_back(message: dict[str, Any], text: str) -> None:
    (turn,) = chat(messages=[message]).messages or ()
    assert turn.content == text
    said = Generate(id="g", model="m", messages=(msgspec.convert(message, Message),))
    assert parse_generate(said).messages == (turn,)


@pytest.mark.parametrize(
    ("fields", "thoughts"),
    [
        ({"reasoning": "Hm."}, "Hm."),
        ({"reasoning_content": "Hm.", "reasoning": "Other."}, "Hm."),
        ({"reasoning_content": None, "reasoning": {"effort": "low"}}, ""),
        ({"reasoning_content": ["Hm."]}, ""),
    ],
)
def test_thoughts_that_are_sent_back(fields: dict[str, Any], thoughts: str) -> None:
    answer = {"role": "assistant", "content": "Yes."} | fields
    messages = chat(messages=[{"role": "user", "content": "hi"}, answer]).messages
    assert messages is not None
    assert messages[1].reasoning == thoughts


def test_how_to_think_is_said_to_the_template() -> None:
    asked = chat(enable_thinking=False, reasoning_effort="low")
    assert asked.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    closer = chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert closer.chat_template_kwargs == {"enable_thinking": True, "x": 1}


def test_safety_identifier_sets_the_user() -> None:
    assert chat(safety_identifier="a").user == "a"
    assert chat(safety_identifier="a", user="b").user == "b"


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        (b'{"a": "b", "c": 1}', "metadata.c"),
        (b'{"a": {"b": "c"}}', "metadata.a"),
        (b'{"a": null}', "metadata.a"),
        (b"[1]", "metadata"),
        (b'{"a": 1}, "model": ', "metadata"),
    ],
)
def test_the_entry_of_metadata_is_named(metadata: bytes, param: str) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": %b}'
    with pytest.raises((ParameterError, InvalidJsonError)) as caught:
        decode(msgspec.json.Decoder(ChatCompletionRequest), body % metadata)
    if isinstance(caught.value, ParameterError):
        assert caught.value.param == param
        assert caught.value.message.startswith(f"{param}: Expected ")


def test_only_text_is_taken_and_roles_are_named() -> None:
    with pytest.raises(ParameterError, match="this model takes text only, not 'image_url'"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(ParameterError, match="must be 'text' for text here, not 'input_text'"):
        chat(messages=[{"role": "user", "content": [{"type": "input_text", "text": "a"}]}])
    with pytest.raises(ParameterError, match=r"must be one of .*developer.*tool"):
        chat(messages=[{"role": "function", "content": "x"}])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "parsed": None}, "messages[0].parsed"),
        ({"role": "system", "content": "x", "id": "m1"}, "messages[0].id"),
        ({"role": "user", "content": "x", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "user", "content": "x", "tool_calls": CALLS}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_call_id": "c"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": 3, "id": "m1"}, "messages[0].content"),
        ({"role": "user", "content": [REFUSAL]}, "messages[0].content[0].type"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "messages[0].audio"),
    ],
)
def test_messages_are_checked(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        chat(messages=[message])
    assert caught.value.param == param


def test_the_completions_of_a_request_are_bounded() -> None:
    assert text(prompt=["a"] * 64, n=2).sampling.n == 2
    with pytest.raises(ParameterError) as caught:
        text(prompt=["a"] * 64, n=3)
    assert caught.value.param == "n"
    for keep in (-1, 2**64):
        with pytest.raises(ParameterError) as caught:
            chat(session_id="s", session_keep=keep)
        assert caught.value.param == "session_keep"


def test_two_limits_that_differ_are_refused() -> None:
    with pytest.raises(ParameterError, match="differ"):
        chat(max_tokens=3, max_completion_tokens=4)
    assert chat(max_tokens=3, max_completion_tokens=3).sampling.max_tokens == 3


@pytest.mark.parametrize("field", ["best_of", "echo", "suffix"])
def test_completions_refuse_by_name_too(field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        text(**{field: 2 if field == "best_of" else "x"})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model": "\xff", "messages": []}',
        b'{"model": "\\ud800", "messages": []}',
        b'{"model": "m", "tool_choice": ' + b"[" * 100_000,
        b'{"model": "m", "tool_choice": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"model": "m", "temperature": NaN}',
    ],
)
def test_what_is_not_json_is_said_to_be_so(body: bytes) -> None:
    with pytest.raises(InvalidJsonError):
        decode(_CHAT, body)


@pytest.mark.parametrize("value", [None, False, True])
def test_a_stop_string_is_kept_by_the_name_of_sglang(value: bool | None) -> None:
    fields = {"no_stop_trim": value, "separate_reasoning": True, "stream_reasoning": True}
    assert chat(**fields).sampling.include_stop_str_in_output is bool(value)
    both = chat(no_stop_trim=True, include_stop_str_in_output=True)
    assert both.sampling.include_stop_str_in_output
