"""Score of a question for routing: cues in many languages, in a bounded part of the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.routing.router import (
    ComplexityScore,
    Cue,
    RoutingQuestion,
    estimated_tokens,
    question_of,
    score,
)
from millrace.schemas.jobs import ChatMessage, Tier
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams

CODE = "```python\ndef mill(stream):\n    return [wheel(drop) for drop in stream]\n```"
PROSE = "The stream leads onto the wheel and the wheel turns. "


def asked(
    text: str,
    *earlier: str,
    system: str = "",
    max_tokens: int | None = None,
    tier: Tier = Tier.FREE,
    has_tools: bool = False,
    grammar: Grammar | None = None,
) -> ComplexityScore:
    turns = [ChatMessage("user", one) for one in (*earlier, text)]
    messages = ([ChatMessage("system", system)] if system else []) + turns
    sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar)
    return score(question_of(None, messages, sampling, tier, has_tools=has_tools))


@pytest.mark.parametrize(
    "text",
    [
        "Prove that there are infinitely many primes.",
        "Prove it!",
        "Work through this step by step, please: what should the miller charge for his flour?",
        "Beweise, dass die Wurzel aus 2 irrational ist.",
        "Démontre que la racine de 2 est irrationnelle.",
        "Demuestra que la raíz de 2 es irracional.",
        "Докажи, что корень из двух иррационален.",
        "请证明根号二是无理数。",
        "√2が無理数であることを証明してください。",
        "2의 제곱근이 무리수임을 증명하세요.",
    ],
)
def test_what_has_to_be_thought_through_is_for_a_large_model(text: str) -> None:
    found = asked(text)
    assert Cue.REASON in found.up
    assert found.value >= 0.5


@pytest.mark.parametrize(
    "text",
    [
        "Translate into French: the wheel turns.",
        "Classify this ticket as bug or wish: the wheel is stuck.",
        "Extract the names from: Ada met Grace.",
        f"Summarise this.\n{PROSE * 20}",
        "Übersetze ins Englische: das Rad dreht sich.",
        "Traduis en anglais : la roue tourne.",
        "Переведи на английский: колесо вращается.",
        "请把这句话翻译成英文。水车在转。",
        "次の文を英語に翻訳してください。水車が回る。",
        "다음 문장을 영어로 번역하세요.",
        "Hello there!",
        "What is TTFT?",
    ],
)
def test_what_is_easy_is_for_a_small_one(text: str) -> None:
    assert asked(text).value < 0.5


def test_a_task_may_stand_in_the_system_message_or_behind_a_long_text() -> None:
    assert Cue.LIGHT in asked(PROSE, system="Classify each message as spam or not.").down
    assert Cue.REASON in asked(f"{PROSE * 400}\nProve it, step by step.").up
    assert Cue.REASON not in asked("This is proverbial; improve the provenance.").up


def test_code_and_maths_are_seen() -> None:
    assert Cue.CODE in asked(CODE).up
    assert Cue.CODE in asked("for (i = 0; i < n; i++) { a[i] = f(b[i]); c[i] = g(a[i]); }").up
    assert Cue.CODE in asked("Why does my Python script hang?").up
    assert Cue.CODE not in asked(PROSE * 10).up
    assert Cue.MATHS in asked("What is 12 * (3 + 4)?").up
    assert Cue.MATHS in asked(r"Evaluate \int_0^1 x dx").up
    assert Cue.MATHS in asked("∫ x dx = ?").up
    assert Cue.MATHS not in asked("We met on 2026-11-21 at 9.").up


def test_length_turns_tools_and_limits_count() -> None:
    assert asked("Hi").down == (Cue.SHORT,)
    assert asked(PROSE * 100).up == (Cue.LONG,)
    assert Cue.TURNS in asked("And?", *["Hm."] * 6).up
    assert asked(PROSE * 3, has_tools=True).up == (Cue.TOOLS,)
    assert asked(PROSE * 3, max_tokens=4_000).up == (Cue.LENGTHY,)
    assert asked(PROSE * 3, max_tokens=8).down == (Cue.BRIEF,)
    assert asked(PROSE * 3, grammar=Grammar(kind=GrammarKind.JSON_OBJECT)).up == (Cue.SCHEMA,)
    assert asked(PROSE * 3, grammar=Grammar(kind=GrammarKind.REGEX, text="a|b")).up == ()
    assert asked(PROSE * 3, tier=Tier.ENTERPRISE).up == (Cue.TIER,)
    values = [asked(PROSE * 3, tier=tier).value for tier in Tier]
    assert values == sorted(values, reverse=True)


def test_cues_of_earlier_turns_go_on_counting() -> None:
    assert Cue.CODE in asked("And now?", CODE, "Thanks.").up


def test_only_a_bounded_part_of_a_text_is_looked_at() -> None:
    long = "word " * 400_000
    messages = [ChatMessage("system", long), *[ChatMessage("user", long)] * 30]
    question = question_of(None, messages, SamplingParams(), Tier.FREE, has_tools=False)
    assert len(question.text) + len(question.task) + len(question.earlier) < 4_096
    assert question.num_prompt_tokens == 31 * len(long) // 4


def test_tokens_are_estimated_by_script() -> None:
    assert estimated_tokens("") == 0
    assert estimated_tokens("a" * 400) == 100
    assert estimated_tokens("水" * 100) == 100
    assert estimated_tokens("水" * 100_000) == 100_000


_TEXTS = st.text(max_size=400) | st.text(alphabet="ab{}()=; \n`", max_size=3_000)
_MESSAGES = st.lists(
    st.builds(ChatMessage, st.sampled_from(["system", "user", "assistant", "tool"]), _TEXTS),
    max_size=8,
)
_ASKED = st.one_of(st.tuples(_TEXTS, st.none()), st.tuples(st.none(), _MESSAGES.map(tuple)))


@given(
    _ASKED,
    st.none() | st.integers(1, 10**6),
    st.sampled_from(Tier),
    st.booleans(),
)
def test_any_question_has_one_score(
    prompt: tuple[str | None, tuple[ChatMessage, ...] | None],
    max_tokens: int | None,
    tier: Tier,
    has_tools: bool,
) -> None:
    def made() -> RoutingQuestion:
        sampling = SamplingParams(max_tokens=max_tokens)
        return question_of(*prompt, sampling, tier, has_tools=has_tools)

    found = score(made())
    assert found == score(made())
    assert 0 <= found.value <= 1
    assert not set(found.up) & set(found.down)
    assert all(re.fullmatch("[a-z]+", cue) for cue in (*found.up, *found.down))
