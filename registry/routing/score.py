"""How much a question asks of a model, from 0 (anything will do) to 1. Pure heuristics.

They look at a bounded part of the text, so that a score costs some tens of microseconds however
long the prompt is. Nothing of the text is in what they give, only which cues there were.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import islice

import msgspec

from millrace.registry.routing import cues
from millrace.schemas.jobs import ChatMessage, Tier
from millrace.schemas.sampling import GrammarKind, SamplingOptions

_BASE = 0.3
_HEAD_CHARACTERS = _TAIL_CHARACTERS = 512
_TASK_CHARACTERS = 256
_EARLIER_TURNS = 3
_EARLIER_CHARACTERS = 512

_CHARACTERS_PER_TOKEN = 4
_BYTES_PER_TOKEN = 3
_SHORT_TOKENS = 24
_LONG_TOKENS = 1_000
_MANY_TURNS = 6
_BRIEF_TOKENS = 64
_LENGTHY_TOKENS = 1_024
_MIN_SYMBOLS = 12
_SYMBOL_SHARE = 0.05

_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_SPACES = str.maketrans(dict.fromkeys("!\"#$%&'()*+,./:;<=>?@[\\]^_`{|}~", " "))
_SUM = re.compile(r"\d ?[+*/^=] ?\(?\d")
_MATHS_SIGN = re.compile("[∑∏∫√∂∀∃≤≥≠≈∞∈⊂→⇒]")


class Cue(StrEnum):
    """What speaks for a large model or a small one."""

    REASON = "reason"
    CODE = "code"
    MATHS = "maths"
    LONG = "long"
    TURNS = "turns"
    TOOLS = "tools"
    SCHEMA = "schema"
    LENGTHY = "lengthy"
    TIER = "tier"
    LIGHT = "light"
    SHORT = "short"
    BRIEF = "brief"


WEIGHTS = {
    Cue.REASON: 0.3,
    Cue.CODE: 0.25,
    Cue.MATHS: 0.25,
    Cue.LONG: 0.2,
    Cue.TURNS: 0.1,
    Cue.TOOLS: 0.2,
    Cue.SCHEMA: 0.1,
    Cue.LENGTHY: 0.15,
    Cue.LIGHT: -0.25,
    Cue.SHORT: -0.1,
    Cue.BRIEF: -0.15,
}
TIER_WEIGHTS = {Tier.ENTERPRISE: 0.1, Tier.PRO: 0.05, Tier.FREE: 0.0, Tier.BATCH: -0.05}


class RoutingQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks, as far as the choice of a model looks at it.

    ``text`` is the beginning and the end of what is asked now, ``task`` where a task is likely to
    be named, ``earlier`` what was asked before; all are short. ``num_prompt_tokens`` is an
    estimate, as nothing was tokenised yet.
    """

    text: str
    task: str
    earlier: str = ""
    num_prompt_tokens: int = 0
    num_turns: int = 1
    has_tools: bool = False
    has_schema: bool = False
    max_tokens: int | None = None
    tier: Tier = Tier.FREE


class ComplexityScore(msgspec.Struct, frozen=True, kw_only=True):
    """``value`` in [0, 1], and the cues that made it, those for a large model and those against."""

    value: float
    up: tuple[Cue, ...] = ()
    down: tuple[Cue, ...] = ()


def question_of(
    prompt: str | None,
    messages: Sequence[ChatMessage] | None,
    sampling: SamplingOptions,
    tier: Tier,
    *,
    has_tools: bool,
) -> RoutingQuestion:
    """The question of a prompt, or of a conversation, in which the user's last message counts
    most, and cues of earlier ones go on counting: a conversation does not change its model with
    every turn."""
    grammar = sampling.grammar
    has_schema = grammar is not None and grammar.kind in (
        GrammarKind.JSON_SCHEMA,
        GrammarKind.JSON_OBJECT,
    )
    if messages is None:
        now, instructions, before, num_turns = prompt or "", "", "", 1
        contents: Sequence[str] = (now,)
    else:
        contents = [message.content for message in messages]
        asked = [one.content for one in messages if one.role == "user"]
        now = asked[-1] if asked else (contents[-1] if contents else "")
        num_turns = len(asked)
        earlier = islice(reversed(asked[:-1]), _EARLIER_TURNS)
        before = "\n".join(text[:_EARLIER_CHARACTERS] for text in earlier)
        first = messages[0] if messages else None
        instructions = first.content if first is not None and first.role == "system" else ""
    return RoutingQuestion(
        text=_ends(now, _HEAD_CHARACTERS, _TAIL_CHARACTERS),
        task=f"{instructions[:_TASK_CHARACTERS]}\n{_ends(now, _TASK_CHARACTERS, _TASK_CHARACTERS)}",
        earlier=before,
        num_prompt_tokens=sum(map(estimated_tokens, contents)),
        num_turns=num_turns,
        has_tools=has_tools,
        has_schema=has_schema,
        max_tokens=sampling.max_tokens,
        tier=tier,
    )


def score(question: RoutingQuestion) -> ComplexityScore:
    """The same question has the same score, always."""
    found = [cue for cue, there in _cues(question) if there]
    value = _BASE + TIER_WEIGHTS[question.tier] + sum(WEIGHTS[cue] for cue in found)
    up = [cue for cue in found if WEIGHTS[cue] > 0]
    if TIER_WEIGHTS[question.tier] > 0:
        up.append(Cue.TIER)
    return ComplexityScore(
        value=round(min(max(value, 0.0), 1.0), 3),
        up=tuple(up),
        down=tuple(cue for cue in found if WEIGHTS[cue] < 0),
    )


def estimated_tokens(text: str) -> int:
    """How many tokens a text has, about: four characters of English, three bytes of others."""
    if text.isascii():
        return len(text) // _CHARACTERS_PER_TOKEN
    sample = text[: 4 * _HEAD_CHARACTERS]
    num_bytes = len(sample.encode(errors="replace")) * len(text) // len(sample)
    return num_bytes // _BYTES_PER_TOKEN


def _cues(question: RoutingQuestion) -> Iterable[tuple[Cue, bool]]:
    task = question.task.casefold()
    words = _words_of(task)
    num_tokens, max_tokens = question.num_prompt_tokens, question.max_tokens
    yield Cue.REASON, _has(task, words, cues.REASON_WORDS, cues.REASON_PHRASES)
    yield Cue.CODE, _is_code(question.text, words) or _is_code(question.earlier, set())
    yield Cue.MATHS, _is_maths(question, task, words)
    yield Cue.LONG, num_tokens >= _LONG_TOKENS
    yield Cue.TURNS, question.num_turns >= _MANY_TURNS
    yield Cue.TOOLS, question.has_tools
    yield Cue.SCHEMA, question.has_schema
    yield Cue.LENGTHY, max_tokens is not None and max_tokens >= _LENGTHY_TOKENS
    yield Cue.LIGHT, _has(task, words, cues.LIGHT_WORDS, cues.LIGHT_PHRASES)
    yield Cue.SHORT, num_tokens < _SHORT_TOKENS and question.num_turns < _MANY_TURNS
    yield Cue.BRIEF, max_tokens is not None and max_tokens <= _BRIEF_TOKENS


def _words_of(text: str) -> set[str]:
    # Translating is several times as fast, and of no use beyond ASCII.
    return set(text.translate(_SPACES).split() if text.isascii() else _WORD.findall(text))


def _has(text: str, words: set[str], known: frozenset[str], phrases: cues.Phrases) -> bool:
    return not known.isdisjoint(words) or any(phrase in text for phrase in _of(text, phrases))


def _of(text: str, phrases: cues.Phrases) -> Sequence[str]:
    """Those that a text may hold."""
    return phrases.ascii if text.isascii() else phrases.all


def _is_code(text: str, words: set[str]) -> bool:
    if not cues.CODE_WORDS.isdisjoint(words):
        return True
    if any(mark in text for mark in cues.CODE_MARKS) or cues.CODE_LINE.search(f"\n{text}"):
        return True
    num_symbols = sum(map(text.count, cues.CODE_SYMBOLS))
    return num_symbols >= _MIN_SYMBOLS and num_symbols >= _SYMBOL_SHARE * len(text)


def _is_maths(question: RoutingQuestion, task: str, words: set[str]) -> bool:
    return (
        not cues.MATHS_WORDS.isdisjoint(words)
        or any(
            mark in text
            for text in (task, question.earlier)
            for mark in _of(text, cues.MATHS_MARKS)
        )
        or _SUM.search(task) is not None
        or (not task.isascii() and _MATHS_SIGN.search(task) is not None)
    )


def _ends(text: str, head: int, tail: int) -> str:
    """The beginning and the end of a text, all of it if it is short."""
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"
