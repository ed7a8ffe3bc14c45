"""Which of two models answers a request whose caller left the choice. Pure: no clock, no I/O.

A route is a name that callers may ask for in place of a model's, most often ``auto``. What a
request asks decides (``registry.routing.score``), then whether the model can answer it at all, and
soon enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

from millrace.registry.routing.score import Cue, RoutingQuestion, score
from millrace.schemas.config import TierPolicies, TierPolicy
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.sampling import SamplingOptions

Size = Literal["small", "large"]

# Of the estimate, how much longer a prompt may turn out to be in tokens.
_ESTIMATE_MARGIN = 2


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two models of the catalogue. A request with at least ``threshold`` of a score in [0, 1] goes
    to ``large``; ``tiers`` have a threshold of their own, or one of the two whatever is asked."""

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
    """How a model stands for the tier of a request.

    ``allows_tier``: the catalogue lets the tier use it. ``num_workers`` are those that take new
    work. ``ttft_ms`` is when the first token is predicted (None: nobody can say); ``is_full``: its
    queue refuses more. ``context_window_tokens`` None: not known yet.
    """

    allows_tier: bool = True
    num_workers: int = 0
    ttft_ms: float | None = None
    is_full: bool = False
    context_window_tokens: int | None = None


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The model, and why: the cues that spoke for it, joined by ``+`` (``plain``: none did), or
    ``pinned`` by the tier, or ``session``; behind a colon what was stronger than these."""

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
    """The model of ``route`` that answers ``question``; never raises.

    What is asked decides first. A conversation that ``former`` answered stays with the large model
    once it was there, as a turn of few words is no reason to fill another cache. Then a model that
    the tier may not use, that the prompt may not fit, or that has no workers gives way to the
    other one if that is better. At last, a tier that may be degraded does not wait for a large
    model which is saturated by the tier's bound, if the small one is sooner.
    """
    size, reason, value = _by_question(route, question, former)
    states: dict[Size, ModelState] = {"small": small, "large": large}
    for why, is_able in _NEEDS:
        able = [one for one in states if is_able(question, states[one])]
        if len(able) == 1:
            # There is no choice, whatever would be better.
            reason = reason if able[0] == size else f"{reason}:{why}"
            return _chosen(route, able[0], reason, value)
    if size == "large" and policy.degrade and _is_late(large, small, policy):
        size, reason = "small", f"{reason}:{SATURATED}"
    return _chosen(route, size, reason, value)


class Router:
    """The routes of a catalogue. ``tiers`` says who may use a model (all tiers, if it does not);
    ``policies`` are the scheduler's. Immutable."""

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
        """``choose`` for the route ``name``, which must be one; ``state_of`` need not know who may
        use a model."""
        route, tier = self.routes[name], question.tier
        small, large = (
            msgspec.structs.replace(
                state_of(model, tier), allows_tier=tier in self._tiers.get(model, (tier,))
            )
            for model in route.models
        )
        return choose(route, question, small, large, getattr(self._policies, tier.value), former)


def routed(job: Job, chosen: Chosen) -> Job:
    """The job with its model, and what was asked for beside it."""
    return msgspec.structs.replace(
        job,
        model=chosen.model,
        model_requested=job.model_requested or job.model,
        route_reason=chosen.reason,
    )


def check_routable(
    name: str, prompts: Sequence[object], sampling: SamplingOptions, *, is_embedding: bool = False
) -> None:
    """Raises ParameterError, naming the field, for what has a meaning with one model only: token
    ids, as each tokenizer has its own, and embeddings."""
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
    """Whether the prompt surely fits; its length is an estimate."""
    window = state.context_window_tokens
    if window is None:
        return True
    num_tokens = question.num_prompt_tokens * _ESTIMATE_MARGIN
    return num_tokens + (question.max_tokens or 1) <= window


def _is_late(large: ModelState, small: ModelState, policy: TierPolicy) -> bool:
    """Whether the large model is over the bound and the small one is sooner."""
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


# What a model must have, the most important first.
_NEEDS: tuple[tuple[str, Callable[[RoutingQuestion, ModelState], bool]], ...] = (
    (TIER, lambda _question, state: state.allows_tier),
    (CONTEXT, _fits),
    (ABSENT, lambda _question, state: state.num_workers > 0),
)
