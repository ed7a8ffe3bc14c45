"""Every sampling field is read from requests, and each engine takes it or refuses it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.registry.requests.parsing import parse_chat
from millrace.schemas.engines import PROMISES
from millrace.schemas.errors import ParameterError
from millrace.schemas.openai import ChatCompletionRequest, ChatFields
from millrace.schemas.sampling import SAMPLING_FIELDS, SamplingOptions

# Requests have another name for these, or Millrace fills them in.
_OTHER_NAMES = {
    "max_reasoning_tokens": "thinking_token_budget",
    "grammar": "response_format",
    "reasoning": "chat_template_kwargs",
    "one_call": "parallel_tool_calls",
}
# A value that no default is, where half of the range's upper end is none.
_VALUES: dict[str, Any] = {
    "max_tokens": 9,
    "stop": ("x",),
    "stop_token_ids": (3,),
    "ignore_eos": True,
    "logit_bias": {3: 1.0},
    "bad_words": ("x",),
    "min_tokens": 2,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "allowed_token_ids": (3,),
    "use_beam_search": True,
}


def _value(name: str) -> Any:
    if name in _VALUES:
        return _VALUES[name]
    high = SAMPLING_FIELDS[name].high
    assert high is not None, f"add a value for {name}"
    return high // 2 if isinstance(high, int) and high > 1 else high / 2


@pytest.mark.parametrize("name", [one for one in SAMPLING_FIELDS if one not in _OTHER_NAMES])
def test_each_field_is_read_from_a_chat(name: str) -> None:
    value = _value(name)
    asked: dict[str, Any] = {name: value}
    if name == "logprobs":
        asked = {"logprobs": True, "top_logprobs": value}
    elif name == "length_penalty":
        asked["use_beam_search"] = True
    messages = [{"role": "user", "content": "x"}]
    body = msgspec.json.encode({"model": "m", "messages": messages, **asked})
    request = msgspec.json.decode(body, type=ChatCompletionRequest)
    assert getattr(parse_chat(request).sampling, name) == value


def test_fields_of_other_names_are_fields_of_requests() -> None:
    assert set(_OTHER_NAMES.values()) <= set(ChatFields.__struct_fields__)


@pytest.mark.parametrize("name", [one for one in SAMPLING_FIELDS if SAMPLING_FIELDS[one].high])
def test_each_range_is_kept(name: str) -> None:
    low, high = SAMPLING_FIELDS[name].low, SAMPLING_FIELDS[name].high
    assert low is not None
    assert high is not None
    for beyond in (low - 1, high + 1):
        with pytest.raises(ParameterError, match=f"{name} must be between") as refused:
            SamplingOptions(**dict[str, Any]({name: beyond}))
        assert refused.value.param == name


def test_each_field_is_taken_or_refused_by_each_engine() -> None:
    """An engine refuses a new field until its dialect sends it."""
    refused = frozenset[str]().union(*(promises.unsupported for promises in PROMISES.values()))
    of_some = {name for name, traits in SAMPLING_FIELDS.items() if not traits.of_every_engine}
    assert of_some <= refused
