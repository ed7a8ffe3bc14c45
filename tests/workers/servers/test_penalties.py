"""Penalties of a resumed completion."""

from __future__ import annotations

from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import SamplingParams
from millrace.workers.servers.dialect import AnswerPart
from millrace.workers.servers.questions import carried_penalties


def test_what_was_made_is_penalised_as_often_as_it_came() -> None:
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    penalties = carried_penalties(sampling, [7, 8, 7])
    assert penalties is not None
    assert penalties.bias == {7: -1.0, 8: -0.75}


def test_there_is_nothing_to_carry_without_tokens_or_penalties() -> None:
    assert carried_penalties(SamplingParams(presence_penalty=0.5), []) is None
    assert carried_penalties(SamplingParams(repetition_penalty=1.5), [7]) is None


def test_the_server_counts_on_for_the_frequency_by_itself() -> None:
    penalties = carried_penalties(SamplingParams(frequency_penalty=1.0), [7])
    assert penalties is not None
    part = AnswerPart(token_ids=[9, 10])
    assert penalties.head(part) == (part, False)


def test_a_token_that_is_new_is_told_before_the_next_is_drawn() -> None:
    penalties = carried_penalties(SamplingParams(presence_penalty=-1.0), [7, 8])
    assert penalties is not None
    part = AnswerPart(token_ids=[8, 7, 9, 7], finish_reason=FinishReason.LENGTH)
    assert penalties.head(part) == (AnswerPart(token_ids=[8, 7, 9]), True)
    last = AnswerPart(token_ids=[8, 9], finish_reason=FinishReason.STOP)
    assert penalties.head(last) == (last, True)
    known = AnswerPart(token_ids=[8, 8])
    assert penalties.head(known) == (known, False)
