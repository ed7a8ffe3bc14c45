"""Router between a small and a large model for requests that name a route. Pure: no clock, no I/O.

A route is a name that callers may request instead of a model's, most often ``auto``. The question
decides first (``registry.routing.router``), then whether the model can answer it at all, and soon
enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Literal

import msgspec

from millrace.registry.routing import cues
from millrace.schemas.config import TierPolicies, TierPolicy
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage, Job, Tier
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
    """Cue for a large model or a small one."""

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
    """Question of a request, as the choice of a model sees it.

    ``text`` is the beginning and the end of the current question. ``task`` is the part that likely
    names a task. ``earlier`` are earlier questions. All are short. ``num_prompt_tokens`` is an
    estimate, as nothing is tokenized yet.
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
    """Score with a ``value`` in [0, 1], and the cues for and against a large model."""

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
    """Return the question of a prompt or a conversation.

    The user's last message counts most. Cues of earlier messages still count, so that a
    conversation does not change its model with every turn.
    """
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
    """Return the score of a question; it is deterministic."""
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
    """Estimate the tokens of a text: four characters each in ASCII text, three bytes each in other
    text.
    """
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
    # Translating is several times as fast, but works only for ASCII.
    return set(text.translate(_SPACES).split() if text.isascii() else _WORD.findall(text))


def _has(text: str, words: set[str], known: frozenset[str], phrases: cues.Phrases) -> bool:
    return not known.isdisjoint(words) or any(phrase in text for phrase in _of(text, phrases))


def _of(text: str, phrases: cues.Phrases) -> Sequence[str]:
    """Return the phrases that the text can contain."""
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
    """Return the beginning and the end of a text; all of it if it is short."""
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


Size = Literal["small", "large"]

# Factor by which a prompt may exceed its estimate in tokens.
_ESTIMATE_MARGIN = 2


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Route between two models of the catalogue.

    A request with a score of at least ``threshold`` (0 to 1) goes to ``large``. An entry in
    ``tiers`` is the tier's own threshold, or one of the models for all its requests.
    """

    small: str
    large: str
    threshold: float = 0.5
    tiers: dict[Tier, float | Size] = {}
    description: str = ""

    def __post_init__(self) -> None:
        if self.small == self.large:
            raise ValueError("small and large must be two models")
        for name, value in [("threshold", self.threshold), *self.tiers.items()]:
            if not isinstance(value, str) and not 0 <= value <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {value}")

    @property
    def models(self) -> tuple[str, str]:
        return (self.small, self.large)


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a model for the tier of a request.

    ``allows_tier``: the catalogue allows the tier to use it. ``num_workers`` are the workers that
    take new work. ``ttft_ms`` is the predicted time to the first token (None: unknown).
    ``is_full``: its queue refuses more requests. ``context_window_tokens`` None: not known yet.
    """

    allows_tier: bool = True
    num_workers: int = 0
    ttft_ms: float | None = None
    is_full: bool = False
    context_window_tokens: int | None = None


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Chosen model, and the reason.

    The reason is the cues for it, joined by ``+`` (``plain``: none), ``pinned`` by the tier, or
    ``session``. After a colon comes the constraint that overrode it.
    """

    model: str
    reason: str
    score: float


PLAIN, PINNED, SESSION = "plain", "pinned", "session"
TIER, CONTEXT, ABSENT, SATURATED = "tier", "context", "absent", "saturated"


def choose(
    route: Route,
    question: RoutingQuestion,
    small: ModelState,
    large: ModelState,
    policy: TierPolicy,
    former: str = "",
) -> Chosen:
    """Return the model of ``route`` that answers ``question``; never raises.

    The question decides first. A conversation stays with the large model if it was its ``former``
    model: a short turn is no reason to fill another cache. Then a model gives way to the other one
    if the tier may not use it, if the prompt may not fit it, or if it has no workers, and the other
    one is better. Finally, a tier that may be degraded does not wait for a large model that is
    saturated by the tier's bound, if the small one is sooner.
    """
    size, reason, value = _by_question(route, question, former)
    states: dict[Size, ModelState] = {"small": small, "large": large}
    for why, is_able in _NEEDS:
        able = [one for one in states if is_able(question, states[one])]
        if len(able) == 1:
            # Only one model is able to answer, so the preference does not count.
            reason = reason if able[0] == size else f"{reason}:{why}"
            return _chosen(route, able[0], reason, value)
    if size == "large" and policy.degrade and _is_late(large, small, policy):
        size, reason = "small", f"{reason}:{SATURATED}"
    return _chosen(route, size, reason, value)


class Router:
    """Routes of a catalogue, and the rules for choosing.

    ``tiers`` are the tiers that may use each model (default: all). ``policies`` are the
    scheduler's. Immutable.
    """

    def __init__(
        self,
        routes: Mapping[str, Route] | None = None,
        tiers: Mapping[str, Collection[Tier]] | None = None,
        policies: TierPolicies | None = None,
    ) -> None:
        self.routes = dict(routes or {})
        self._tiers = dict(tiers or {})
        self._policies = policies or TierPolicies()

    def choose(
        self,
        name: str,
        question: RoutingQuestion,
        state_of: Callable[[str, Tier], ModelState],
        former: str = "",
    ) -> Chosen:
        """Choose the model for the route ``name``, which must exist; ``state_of`` need not set
        ``allows_tier``.
        """
        route, tier = self.routes[name], question.tier
        small, large = (
            msgspec.structs.replace(
                state_of(model, tier), allows_tier=tier in self._tiers.get(model, (tier,))
            )
            for model in route.models
        )
        return choose(route, question, small, large, getattr(self._policies, tier.value), former)


def routed(job: Job, chosen: Chosen) -> Job:
    """Return the job with its model, and with the requested name beside it."""
    return msgspec.structs.replace(
        job,
        model=chosen.model,
        model_requested=job.model_requested or job.model,
        route_reason=chosen.reason,
    )


def check_routable(
    name: str, prompts: Sequence[object], sampling: SamplingOptions, *, is_embedding: bool = False
) -> None:
    """Raise ParameterError, naming the field, for features that are specific to one model: token
    ids, as each tokenizer has its own, and embeddings.
    """
    if is_embedding:
        raise ParameterError(
            "model", f"{name} chooses a model for completions; name one for an embedding."
        )
    if any(prompt is not None and not isinstance(prompt, str) for prompt in prompts):
        raise ParameterError(
            "prompt", f"Token ids belong to one model: name it instead of {name}, or send text."
        )
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if getattr(sampling, field):
            raise ParameterError(
                field, f"{field} holds token ids of one model: name it instead of {name}."
            )


def _by_question(route: Route, question: RoutingQuestion, former: str) -> tuple[Size, str, float]:
    found = score(question)
    rule = route.tiers.get(question.tier, route.threshold)
    if isinstance(rule, str):
        return rule, PINNED, found.value
    if found.value >= rule:
        return "large", _said(found.up), found.value
    if former == route.large:
        return "large", SESSION, found.value
    return "small", _said(found.down), found.value


def _said(cues: Sequence[Cue]) -> str:
    return "+".join(cues) or PLAIN


def _chosen(route: Route, size: Size, reason: str, value: float) -> Chosen:
    model = route.large if size == "large" else route.small
    return Chosen(model=model, reason=reason, score=value)


def _fits(question: RoutingQuestion, state: ModelState) -> bool:
    """Return whether the prompt certainly fits; its length is an estimate."""
    window = state.context_window_tokens
    if window is None:
        return True
    num_tokens = question.num_prompt_tokens * _ESTIMATE_MARGIN
    return num_tokens + (question.max_tokens or 1) <= window


def _is_late(large: ModelState, small: ModelState, policy: TierPolicy) -> bool:
    """Return whether the large model is over the bound and the small one is sooner."""
    if small.is_full or not small.num_workers:
        return False
    if large.is_full:
        return True
    bound_s = policy.ttft_bound_s
    if bound_s is None or large.ttft_ms is None:
        return False
    return large.ttft_ms / 1e3 > bound_s and (
        small.ttft_ms is None or small.ttft_ms < large.ttft_ms
    )


# Requirements on a model, most important first.
_NEEDS: tuple[tuple[str, Callable[[RoutingQuestion, ModelState], bool]], ...] = (
    (TIER, lambda _question, state: state.allows_tier),
    (CONTEXT, _fits),
    (ABSENT, lambda _question, state: state.num_workers > 0),
)
