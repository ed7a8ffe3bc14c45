"""Separation of thoughts from answers, for any pieces of the text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.catalogue import load_catalogue
from millrace.registry.chat_template import ChatTemplate
from millrace.registry.reasoning import (
    ReasoningParser,
    closing_of,
    format_after,
    format_within,
    num_reasoning_tokens,
)
from millrace.registry.served import ServedModel
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.notices import Notice, NoticeCode
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingOptions
from tests.support.engine.checkpoints_made import write_checkpoint

CLOSED, OPEN = ReasoningFormat(), ReasoningFormat(is_open=True)
_PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", "a b", "\n", "\n\n", " ", "é"]),
    max_size=12,
)
# As Qwen3's: thinking is on unless it is asked not to, and earlier thoughts are told.
SWITCHED = """{% for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content is string %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
# As DeepSeek's newer ones: thinking is off unless it is asked for, and the prompt begins it.
OFFERED = """{% for message in messages %}{{ message.content }}{% endfor %}
{%- if thinking %}<think>{% else %}</think>{% endif %}"""
ASKED = ChatMessage("user", "hi")


def parsed(reasoning: ReasoningFormat, *pieces: str) -> tuple[str, str]:
    parser = ReasoningParser(reasoning)
    told = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(thoughts for thoughts, _ in told), "".join(answer for _, answer in told)


@pytest.mark.parametrize(
    ("reasoning", "text", "thoughts", "answer"),
    [
        (CLOSED, "<think>\nSo.\n\nYes.\n</think>\n\nIt is.\n", "So.\n\nYes.", "It is.\n"),
        (CLOSED, "\n<think></think>It is.", "", "It is."),
        (CLOSED, " It <think>is</think>.", "", " It <think>is</think>."),
        (CLOSED, "<think>never ended </thi", "never ended </thi", ""),
        (CLOSED, "<thin", "", "<thin"),
        (CLOSED, "", "", ""),
        (OPEN, "So. </think> It is.", "So.", "It is."),
        (OPEN, "<think>So.</think>It </think> is.", "So.", "It </think> is."),
        (OPEN, "So. \n", "So.", ""),
        (OPEN, "<think", "<think", ""),
        (ReasoningFormat(start="[THINK]", end="[/THINK]"), "[THINK]a[/THINK]b", "a", "b"),
    ],
)
def test_a_text(reasoning: ReasoningFormat, text: str, thoughts: str, answer: str) -> None:
    assert parsed(reasoning, text) == (thoughts, answer)
    assert parsed(reasoning, *text) == (thoughts, answer)


@given(_PIECES, st.booleans(), st.randoms(use_true_random=False))
def test_parsed_thoughts_do_not_depend_on_the_cuts(
    pieces: list[str], is_open: bool, draw: random.Random
) -> None:
    reasoning = OPEN if is_open else CLOSED
    text = "".join(pieces)
    cuts = sorted(draw.sample(range(len(text) + 1), draw.randint(0, min(4, len(text)))))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(reasoning, *cut) == parsed(reasoning, text)
    # What is out after a beginning is the beginning of what is out after all of it.
    parser, whole = ReasoningParser(reasoning), parsed(reasoning, text)
    thoughts, answer = parser.push(text[: len(text) // 2])
    assert whole[0].startswith(thoughts)
    assert whole[1].startswith(answer)


@pytest.mark.parametrize(
    ("reasoning", "pieces", "count"),
    [
        (CLOSED, ["<think>", "So", ".", "</think>", "\n\n", "It"], 4),
        (CLOSED, ["<think></think>", "It"], 1),
        (CLOSED, ["It", " is", "<think>", "</think>"], 0),
        (CLOSED, ["<", "think>", "a"], 3),
        (OPEN, ["So", "</", "think", ">\n", "It"], 4),
        (OPEN, ["So", "."], 2),
        (OPEN, [], 0),
    ],
)
def test_the_tokens_that_thoughts_took(
    reasoning: ReasoningFormat, pieces: list[str], count: int
) -> None:
    assert num_reasoning_tokens(reasoning, pieces) == count


def test_what_a_prompt_leaves() -> None:
    assert format_after("hi<|assistant|>", CLOSED) == CLOSED
    assert format_after("hi<|assistant|><think>\n", CLOSED) == OPEN
    assert format_after("hi<|assistant|><think>\n\n</think>\n\n", CLOSED) is None
    for reasoning in (CLOSED, OPEN):
        start = "<think>" if reasoning.is_open else ""
        assert format_after(f"hi{start}{closing_of(reasoning)}", CLOSED) is None


@pytest.mark.parametrize(
    ("content", "thoughts", "begun"),
    [
        ("", "Hm", OPEN),
        ("<think>\nHm", "", OPEN),
        ("<think>Hm</think>", "", None),
        ("<think>Hm</think>It", "", None),
        ("It", "Hm", None),
        ("It", "", None),
    ],
)
def test_what_a_message_leaves_that_is_gone_on_with(
    content: str, thoughts: str, begun: ReasoningFormat | None
) -> None:
    assert format_within(content, thoughts, CLOSED) == begun
    messages = (ASKED, ChatMessage("assistant", content, reasoning=thoughts))
    text = ChatTemplate(SWITCHED, {}).render(messages, continue_final_message=True)
    assert text.endswith(content or thoughts)


@pytest.mark.parametrize("marker", ["", "  ", "x" * 65])
def test_markers_are_checked(marker: str) -> None:
    with pytest.raises(ValueError, match="reasoning format"):
        ReasoningFormat(end=marker)


# --- templates ---


@pytest.mark.parametrize(
    ("source", "arguments", "end"),
    [
        (SWITCHED, {}, "<|assistant|>"),
        (SWITCHED, {"enable_thinking": False}, "</think>\n\n"),
        (SWITCHED, {"thinking": False}, "</think>\n\n"),
        (SWITCHED, {"reasoning_effort": "none"}, "</think>\n\n"),
        (SWITCHED, {"reasoning_effort": "none", "enable_thinking": True}, "<|assistant|>"),
        (OFFERED, {}, "</think>"),
        (OFFERED, {"enable_thinking": True}, "<think>"),
        (OFFERED, {"reasoning_effort": "high"}, "<think>"),
        (OFFERED, {"reasoning_effort": "minimal"}, "</think>"),
        ("{{ reasoning_effort }}", {"reasoning_effort": "low"}, "low"),
        ("{{ custom.deep[1] }}", {"custom": {"deep": [1, 2]}}, "2"),
        ("{{ documents[0].text }}", {"documents": [{"text": "of a book"}]}, "of a book"),
    ],
)
def test_whether_to_think_has_the_name_that_the_template_knows(
    source: str, arguments: dict[str, Any], end: str
) -> None:
    assert ChatTemplate(source, {}).render([ASKED], arguments=arguments).endswith(end)


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "tools", "add_generation_prompt", "bos_token", "pad_token"),
        *("raise_exception", "strftime_now", "range", "namespace", "dict", "cycler", "joiner"),
        *("lipsum", "loop", "self"),
    ],
)
def test_what_a_request_may_not_say(name: str) -> None:
    template = ChatTemplate(SWITCHED, {"bos_token": "<s>"})
    with pytest.raises(ParameterError) as caught:
        template.render([ASKED], arguments={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_earlier_thoughts_are_told_to_the_template() -> None:
    thought = ChatMessage("assistant", "It is.", reasoning="So.")
    text = ChatTemplate(SWITCHED, {}).render([ASKED, thought, ASKED])
    assert "<think>\nSo.\n</think>\nIt is.<|end|>" in text


# --- models ---


def served(tmp_path: Path, template: str = SWITCHED, **entry: Any) -> ServedModel:
    path = write_checkpoint(
        tmp_path / "tiny",
        chat_template=template,
        special_tokens=["<think>", "</think>"],
        max_position_embeddings=512,
    )
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"models": {"tiny": {"source": f"./{path.name}", **entry}}}))
    return ServedModel.load(load_catalogue(str(file)), "tiny")


def prepared(model: ServedModel, sampling: SamplingOptions | None = None, **fields: Any) -> Job:
    job = Job(
        request_id="r",
        model="tiny",
        messages=(ASKED,),
        sampling=sampling or SamplingOptions(),
        **fields,
    )
    return model.prepare(job, random.Random(1))


def test_a_job_says_how_its_completion_begins(tmp_path: Path) -> None:
    model = served(tmp_path)
    assert prepared(model).sampling.reasoning == CLOSED
    off = prepared(model, chat_template_kwargs={"enable_thinking": False})
    assert off.sampling.reasoning is None
    assert off.chat_template_kwargs == {}
    assert model.prepare(off, random.Random(2)) == off
    # Markers that are special tokens are text all the same.
    ids = model.tokenizer.encode("<think>a</think>", add_special_tokens=False)
    assert model.tokenizer.decode(ids) == "<think>a</think>"


def test_a_budget_is_for_models_that_think(tmp_path: Path) -> None:
    budget = SamplingOptions(max_reasoning_tokens=3)
    model = served(tmp_path)
    assert prepared(model, budget).sampling.max_reasoning_tokens == 3
    off = prepared(model, budget, chat_template_kwargs={"enable_thinking": False})
    assert off.sampling.max_reasoning_tokens is None
    assert (off.notices, prepared(model, budget).notices) == ((), ())
    plain = served(tmp_path, "{{ messages[0].content }}")
    for fields in ({"messages": (ASKED,)}, {"prompt": "hi"}):
        job = Job(request_id="r", model="tiny", sampling=budget, **fields)
        without = plain.prepare(job, random.Random(1))
        assert (without.sampling.max_reasoning_tokens, without.notices) == (None, ())


@pytest.mark.parametrize("kind", [kind for kind in EngineKind if kind is not EngineKind.REAL])
def test_a_budget_that_an_engine_cannot_enforce_is_told(tmp_path: Path, kind: EngineKind) -> None:
    budget = SamplingOptions(max_reasoning_tokens=3)
    model = served(tmp_path, engine={"kind": kind})
    told = (Notice(NoticeCode.BUDGET_NOT_ENFORCED, "max_reasoning_tokens"),)
    job = prepared(model, budget)
    assert (job.sampling.reasoning, job.sampling.max_reasoning_tokens) == (CLOSED, None)
    assert job.notices == told
    assert model.prepare(job, random.Random(2)) == job
    off = prepared(model, budget, chat_template_kwargs={"enable_thinking": False})
    assert (off.sampling.max_reasoning_tokens, off.notices) == (None, ())
    assert prepared(model).notices == ()


def test_a_budget_of_thoughts_that_are_not_told_apart(tmp_path: Path) -> None:
    budget = SamplingOptions(max_reasoning_tokens=3)
    job = Job(request_id="r", model="tiny", prompt="hi", sampling=budget)
    job = served(tmp_path).prepare(job, random.Random(1))
    assert job.sampling.max_reasoning_tokens is None
    assert [one.code for one in job.notices] == [NoticeCode.BUDGET_NOT_ENFORCED]


def test_variables_of_a_template_go_with_messages(tmp_path: Path) -> None:
    job = Job(request_id="r", model="tiny", prompt="hi", chat_template_kwargs={"a": 1})
    with pytest.raises(ParameterError) as caught:
        served(tmp_path).prepare(job, random.Random(1))
    assert caught.value.param == "chat_template_kwargs"


def test_an_engine_that_holds_thoughts_to_the_grammar_gets_none(tmp_path: Path) -> None:
    held = SamplingOptions(grammar=Grammar(kind=GrammarKind.JSON_OBJECT))
    own = prepared(served(tmp_path), held)
    assert own.sampling.reasoning == CLOSED
    model = served(tmp_path, engine={"kind": "llamacpp"})
    job = prepared(model, held)
    assert job.sampling.reasoning is None
    tail = model.tokenizer.decode(job.prompt_token_ids or ())
    assert tail.endswith("<think>\n\n</think>\n\n")


def test_the_catalogue_has_the_last_word(tmp_path: Path) -> None:
    assert prepared(served(tmp_path, reasoning_format="none")).sampling.reasoning is None
    other = {"start": "<a>", "end": "</a>"}
    model = served(tmp_path, "{{ messages[0].content }}", reasoning_format=other)
    assert prepared(model).sampling.reasoning == ReasoningFormat(start="<a>", end="</a>")
    with pytest.raises(ConfigError, match="reasoning format"):
        served(tmp_path, reasoning_format={"start": ""})
