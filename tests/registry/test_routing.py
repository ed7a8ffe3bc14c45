"""Choice of a request's model, for all states of the models, and the catalogue's routes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.registry.routing.router import (
    Chosen,
    Cue,
    ModelState,
    Route,
    Router,
    RoutingQuestion,
    check_routable,
    choose,
    routed,
)
from millrace.schemas.config import TierPolicies, TierPolicy
from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.jobs import MAX_LABEL_CHARACTERS, Job, Tier
from millrace.schemas.sampling import SamplingParams

ROUTE = Route(small="s", large="l")
EASY = RoutingQuestion(text="hi", task="hi", num_prompt_tokens=100)
HARD = RoutingQuestion(text="prove it", task="prove it", num_prompt_tokens=100)
THERE = ModelState(num_workers=1, context_window_tokens=4_096)
GONE = replace(THERE, num_workers=0)
LATE = replace(THERE, ttft_ms=9_000.0)
FULL = replace(THERE, is_full=True)
BEST_EFFORT = TierPolicy(weight=1, ttft_bound_ms=1_000, degrade=True)
PATIENT = TierPolicy(weight=1, ttft_bound_ms=1_000)


def chosen(
    question: RoutingQuestion,
    small: ModelState = THERE,
    large: ModelState = THERE,
    policy: TierPolicy = BEST_EFFORT,
    former: str = "",
    route: Route = ROUTE,
) -> tuple[str, str]:
    found = choose(route, question, small, large, policy, former)
    return found.model, found.reason


def test_what_is_asked_decides_first() -> None:
    assert chosen(EASY) == ("s", "plain")
    assert chosen(replace(EASY, num_prompt_tokens=2)) == ("s", "short")
    assert chosen(HARD) == ("l", "reason")
    assert chosen(replace(HARD, has_tools=True)) == ("l", "reason+tools")


def test_a_tier_may_have_a_threshold_or_a_model_of_its_own() -> None:
    route = Route(small="s", large="l", tiers={Tier.FREE: 0.9, Tier.PRO: 0.0, Tier.BATCH: "small"})
    assert chosen(HARD, route=route) == ("s", "plain")
    assert chosen(replace(EASY, tier=Tier.PRO), route=route) == ("l", "tier")
    assert chosen(replace(HARD, tier=Tier.BATCH), route=route) == ("s", "pinned")
    assert chosen(replace(HARD, tier=Tier.BATCH), route=route, former="l") == ("s", "pinned")


def test_a_conversation_goes_up_and_stays_there() -> None:
    assert chosen(EASY, former="l") == ("l", "session")
    assert chosen(HARD, former="s") == ("l", "reason")
    assert chosen(EASY, former="s") == ("s", "plain")
    assert chosen(EASY, former="another") == ("s", "plain")
    assert chosen(EASY, large=LATE, former="l") == ("s", "session:saturated")
    assert chosen(EASY, large=GONE, former="l") == ("s", "session:absent")


def test_a_saturated_model_is_for_those_who_may_wait_no_less() -> None:
    assert chosen(HARD, large=LATE) == ("s", "reason:saturated")
    assert chosen(HARD, large=FULL) == ("s", "reason:saturated")
    assert chosen(HARD, large=LATE, policy=PATIENT) == ("l", "reason")
    assert chosen(HARD, large=FULL, policy=PATIENT) == ("l", "reason")
    assert chosen(HARD, large=replace(THERE, ttft_ms=999.0)) == ("l", "reason")
    no_bound = replace(BEST_EFFORT, ttft_bound_ms=0)
    assert chosen(HARD, large=LATE, policy=no_bound) == ("l", "reason")


def test_a_small_model_that_is_no_sooner_is_no_help() -> None:
    assert chosen(HARD, small=replace(THERE, ttft_ms=9_500.0), large=LATE) == ("l", "reason")
    assert chosen(HARD, small=replace(THERE, ttft_ms=500.0), large=LATE)[0] == "s"
    assert chosen(HARD, small=FULL, large=LATE) == ("l", "reason")
    assert chosen(HARD, small=GONE, large=LATE) == ("l", "reason")


def test_a_model_that_is_not_there_gives_way() -> None:
    assert chosen(HARD, large=GONE) == ("s", "reason:absent")
    assert chosen(EASY, small=GONE) == ("l", "plain:absent")
    assert chosen(HARD, GONE, GONE) == ("l", "reason")


def test_a_prompt_goes_where_it_surely_fits() -> None:
    long = replace(EASY, num_prompt_tokens=900)
    narrow, unknown = (replace(THERE, context_window_tokens=size) for size in (1_024, None))
    late = replace(THERE, ttft_ms=9_000.0)
    assert chosen(long, small=narrow) == ("l", "plain:context")
    assert chosen(long, small=narrow, large=late) == ("l", "plain:context")
    assert chosen(replace(long, max_tokens=200), small=narrow) == ("l", "plain:context")
    assert chosen(long, small=narrow, large=narrow) == ("s", "plain")
    assert chosen(long, small=unknown) == ("s", "plain")
    assert chosen(replace(HARD, num_prompt_tokens=900), large=narrow) == ("s", "reason:context")


def test_a_model_that_the_tier_may_not_use_is_never_chosen() -> None:
    barred = replace(THERE, allows_tier=False)
    assert chosen(HARD, large=barred) == ("s", "reason:tier")
    assert chosen(HARD, small=barred, large=LATE) == ("l", "reason")
    assert chosen(HARD, GONE, barred) == ("s", "reason:tier")


_STATES = st.builds(
    ModelState,
    allows_tier=st.booleans(),
    num_workers=st.integers(0, 3),
    ttft_ms=st.none() | st.floats(0, 1e9),
    is_full=st.booleans(),
    context_window_tokens=st.none() | st.integers(2, 10**6),
)
_QUESTIONS = st.builds(
    RoutingQuestion,
    text=st.text(max_size=50),
    task=st.sampled_from(["prove", "translate", "", "∫", "12 + 7", "```"]),
    num_prompt_tokens=st.integers(0, 10**6),
    num_turns=st.integers(0, 50),
    has_tools=st.booleans(),
    has_schema=st.booleans(),
    max_tokens=st.none() | st.integers(1, 10**6),
    tier=st.sampled_from(Tier),
)
_ROUTES = st.builds(
    Route,
    small=st.just("s"),
    large=st.just("l"),
    threshold=st.floats(0, 1),
    tiers=st.dictionaries(
        st.sampled_from(Tier), st.floats(0, 1) | st.sampled_from(["small", "large"])
    ),
)


@given(_ROUTES, _QUESTIONS, _STATES, _STATES, st.sampled_from(["", "s", "l", "x"]))
def test_there_is_always_one_choice_and_it_says_why(
    route: Route, question: RoutingQuestion, small: ModelState, large: ModelState, former: str
) -> None:
    policy = getattr(TierPolicies(), question.tier.value)
    found = choose(route, question, small, large, policy, former)
    assert found == choose(route, question, small, large, policy, former)
    assert found.model in route.models
    cues, _, stronger = found.reason.partition(":")
    assert set(cues.split("+")) <= {*Cue, "plain", "pinned", "session"}
    assert stronger in ("", "tier", "context", "absent", "saturated")
    assert len(found.reason) <= MAX_LABEL_CHARACTERS
    states = {"s": small, "l": large}
    if any(state.allows_tier for state in states.values()):
        assert states[found.model].allows_tier


def test_a_router_knows_tiers_and_policies() -> None:
    policies = TierPolicies(free=PATIENT, pro=BEST_EFFORT)
    router = Router({"auto": ROUTE}, {"l": (Tier.FREE, Tier.PRO)}, policies)

    def state_of(model: str, _tier: Tier) -> ModelState:
        return LATE if model == "l" else THERE

    def model_for(tier: Tier) -> str:
        return router.choose("auto", replace(HARD, tier=tier), state_of).model

    assert [model_for(tier) for tier in (Tier.FREE, Tier.PRO, Tier.ENTERPRISE)] == ["l", "s", "s"]


def test_a_routed_job_says_what_was_asked_for() -> None:
    job = Job(request_id="r", model="auto", prompt="hi")
    got = routed(job, Chosen(model="s", reason="short", score=0.2))
    assert (got.model, got.model_requested, got.route_reason) == ("s", "auto", "short")


@pytest.mark.parametrize(
    ("prompts", "sampling", "is_embedding", "param"),
    [
        (((1, 2),), SamplingParams(), False, "prompt"),
        (("a", (1,)), SamplingParams(), False, "prompt"),
        (("a",), SamplingParams(stop_token_ids=(1,)), False, "stop_token_ids"),
        (("a",), SamplingParams(logit_bias={1: 1.0}), False, "logit_bias"),
        (("a",), SamplingParams(allowed_token_ids=(1,)), False, "allowed_token_ids"),
        (("a",), SamplingParams(), True, "model"),
    ],
)
def test_what_one_model_only_can_mean_is_refused_by_name(
    prompts: tuple[object, ...], sampling: SamplingParams, is_embedding: bool, param: str
) -> None:
    with pytest.raises(ParameterError, match="auto") as caught:
        check_routable("auto", prompts, sampling, is_embedding=is_embedding)
    assert caught.value.param == param


# --- the catalogue ---

_MODELS = "models:\n  a: {source: ./a}\n  b: {source: ./b, tiers: [pro]}\n"


def written(folder: Path, routes: str) -> Catalogue:
    file = folder / "models.yaml"
    file.write_text(f"{_MODELS}routes: {routes}\n")
    return load_catalogue(str(file))


def test_routes_are_read_and_written(tmp_path: Path) -> None:
    text = "{auto: {small: a, large: b, threshold: 1, tiers: {batch: small, free: 0.7}}}"
    catalogue = written(tmp_path, text)
    route = catalogue.routes["auto"]
    assert (route.models, route.threshold) == (("a", "b"), 1)
    assert route.tiers == {Tier.BATCH: "small", Tier.FREE: 0.7}
    copy = tmp_path / "copy.yaml"
    catalogue.with_model("org/large").write(copy)
    assert load_catalogue(str(copy)).routes == catalogue.routes
    assert catalogue.only({"a": catalogue.get("a")}).routes == {}
    both = {name: catalogue.get(name) for name in ("a", "b")}
    assert catalogue.only(both).routes == catalogue.routes
    assert catalogue.router().routes == catalogue.routes
    assert load_catalogue("").routes == {}


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ("[]", ["`routes` must be a mapping"]),
        ("{auto: {small: a}}", ["route auto", "`large`"]),
        ("{auto: {small: a, large: c}}", ["route auto", "'c'", "a, b"]),
        ("{auto: {small: a, large: a}}", ["route auto", "two models"]),
        ("{auto: {small: a, large: b, threshold: 2}}", ["threshold", "2"]),
        ("{auto: {small: a, large: b, tiers: {free: -1}}}", ["free", "-1"]),
        ("{auto: {small: a, large: b, tiers: {free: middle}}}", ["route auto", "middle"]),
        ("{auto: {small: a, large: b, tiers: {gold: small}}}", ["route auto", "gold"]),
        ("{auto: {small: a, large: b, tiers: {free: large}}}", ["tier free", "model b"]),
        ("{auto: {small: a, large: b, colour: red}}", ["route auto", "`colour`"]),
        ("{a: {small: a, large: b}}", ["route a", "not a model's name"]),
        ("{'x y': {small: a, large: b}}", ["route x y", "without spaces"]),
    ],
)
def test_a_bad_route_is_named(tmp_path: Path, routes: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, routes)
    for word in words:
        assert word in caught.value.message
