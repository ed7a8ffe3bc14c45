"""Fields of a beam search, and fields that it refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.schemas.engines import EngineKind, check_supported
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import (
    MAX_CHOICES,
    SAMPLING_FIELDS,
    Grammar,
    GrammarKind,
    SamplingDefaults,
    SamplingOptions,
    SamplingParams,
)
from millrace.schemas.tools import ToolFormat

_ALLOWED: dict[str, Any] = {
    "n": MAX_CHOICES,
    "length_penalty": -2.5,
    "temperature": 0.7,
    "max_tokens": 8,
    "min_tokens": 3,
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "seed": 3,
}
_REFUSED: dict[str, Any] = {
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "typical_p": 0.5,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "bad_words": ("x",),
    "allowed_token_ids": (3,),
    "stop": ("x",),
    "logprobs": 0,
    "prompt_logprobs": 0,
    "grammar": Grammar(kind=GrammarKind.JSON_OBJECT),
    "max_reasoning_tokens": 5,
    "one_call": ToolFormat.HERMES,
}
for _name, _traits in SAMPLING_FIELDS.items():
    if _traits.high is not None and _name not in _ALLOWED:
        _REFUSED.setdefault(_name, _traits.high)
# Who accepts a request fills it in; a beam is parsed by it as any text is.
_FILLED_IN = {"reasoning", "use_beam_search"}


def test_each_field_goes_with_a_beam_search_or_is_refused() -> None:
    fields = set(SamplingOptions.__struct_fields__)
    assert fields == _FILLED_IN.union(_ALLOWED, _REFUSED)
    options = SamplingOptions(use_beam_search=True, **_ALLOWED)
    assert options.num_answers == MAX_CHOICES
    for name, value in _REFUSED.items():
        for kind in (SamplingOptions, SamplingParams):
            with pytest.raises(ParameterError) as refused:
                kind(use_beam_search=True, **{name: value})
            assert refused.value.param == name
            with pytest.raises(ParameterError):
                msgspec.structs.replace(options, **{name: value})


def test_what_asks_for_nothing_is_no_obstacle() -> None:
    options = SamplingOptions(use_beam_search=True, top_p=1.0, top_k=0, min_p=0.0, n=2)
    filled = options.with_defaults(
        SamplingDefaults(temperature=0.6, top_p=0.8, top_k=20, repetition_penalty=1.1),
        seed=1,
        max_tokens=5,
    )
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.0, 1.0, 0)
    assert filled.repetition_penalty == 1.0


@pytest.mark.parametrize("value", [-10.5, 11.0, float("nan")])
def test_length_penalty_is_within_bounds(value: float) -> None:
    with pytest.raises(ParameterError) as refused:
        SamplingOptions(use_beam_search=True, length_penalty=value)
    assert refused.value.param == "length_penalty"


def test_length_penalty_goes_only_with_a_beam_search() -> None:
    with pytest.raises(ParameterError) as refused:
        SamplingOptions(length_penalty=2.0)
    assert refused.value.param == "length_penalty"


@pytest.mark.parametrize("kind", EngineKind)
@pytest.mark.parametrize("n", [1, 4])
def test_engines_that_others_wrote_refuse_it_by_name(kind: EngineKind, n: int) -> None:
    options = SamplingOptions(use_beam_search=True, n=n)
    if kind is EngineKind.REAL:
        check_supported(options, None, kind)
        return
    with pytest.raises(ParameterError) as refused:
        check_supported(options, None, kind)
    assert refused.value.param == "use_beam_search"


def test_a_job_may_have_the_tokens_of_all_its_answers() -> None:
    def job(**sampling: Any) -> Job:
        return Job(request_id="r", model="m", prompt="x", sampling=SamplingOptions(**sampling))

    assert job(max_tokens=5).max_completion_tokens == 5
    assert job(max_tokens=5, n=3).max_completion_tokens == 5
    assert job(max_tokens=5, n=3, use_beam_search=True).max_completion_tokens == 15
    assert job().max_completion_tokens == 0
