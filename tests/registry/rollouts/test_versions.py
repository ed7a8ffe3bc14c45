"""Choice of a version: by share, evenly, and the same for the same key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from millrace.registry.rollouts.versions import Versions, check_label, split
from millrace.schemas.errors import ConfigError
from millrace.schemas.models.rollouts import Rollout, RolloutState

NAMES = ("chat@v2", "chat", "chat@v3", "other", "org/model@main")
VERSIONS = Versions(NAMES)
ROLLOUT = Rollout(
    model="chat", stable="chat", candidate="chat@v2", state=RolloutState.RUNNING, percent=30.0
)
KEYS = [f"r{number}" for number in range(4_000)]


def test_names_with_a_version_stand_beside_their_model() -> None:
    assert set(VERSIONS.models()) == {"chat", "org/model"}
    assert VERSIONS.of("chat") == ("chat", "chat@v2", "chat@v3")
    assert VERSIONS.of("other") == ()
    assert split("org/model@main") == ("org/model", "main")
    assert split("@x") == ("@x", "")
    assert split("x@") == ("x@", "")
    names = ("chat", "chat@stable", "chat@canary", "chat@v2", "other", "other@stable")
    several = [name for name in names if VERSIONS.stands_for_several(name)]
    assert several == ["chat", "chat@stable", "chat@canary"]


def test_without_a_rollout_the_first_answers() -> None:
    assert {VERSIONS.resolve("chat", key, {}) for key in KEYS} == {"chat"}
    assert VERSIONS.resolve("org/model", "r", {}) == "org/model@main"
    assert VERSIONS.shares("chat", {}) == {"chat": 100.0, "chat@v2": 0.0, "chat@v3": 0.0}
    assert VERSIONS.resolve("chat@canary", "r", {}) is None


def test_a_share_of_the_keys_gets_the_candidate() -> None:
    rollouts = {"chat": ROLLOUT}
    chosen = [VERSIONS.resolve("chat", key, rollouts) for key in KEYS]
    assert chosen.count("chat@v2") / len(KEYS) == pytest.approx(0.30, abs=0.03)
    assert VERSIONS.shares("chat", rollouts) == {"chat": 70.0, "chat@v2": 30.0, "chat@v3": 0.0}
    assert VERSIONS.resolve("chat@stable", "r", rollouts) == "chat"
    assert VERSIONS.resolve("chat@canary", "r", rollouts) == "chat@v2"
    assert VERSIONS.resolve("chat@initial", "r", rollouts) == "chat"


@given(st.text(max_size=40), st.floats(0, 100), st.floats(0, 100))
def test_key_keeps_the_candidate_while_its_share_grows(key: str, one: float, other: float) -> None:
    less, more = sorted((one, other))
    few, many = ({"chat": replace(ROLLOUT, percent=percent)} for percent in (less, more))
    if VERSIONS.resolve("chat", key, few) == "chat@v2":
        assert VERSIONS.resolve("chat", key, many) == "chat@v2"
    assert VERSIONS.resolve("chat", key, few) == VERSIONS.resolve("chat", key, few)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": RolloutState.WAITING, "percent": 0.0}, "chat"),
        ({"state": RolloutState.ABORTED, "percent": 100.0}, "chat"),
        ({"state": RolloutState.COMPLETED, "stable": "chat@v2"}, "chat@v2"),
        ({"percent": 100.0}, "chat@v2"),
        # Versions that are not there any more.
        ({"percent": 100.0, "candidate": "chat@v9"}, "chat"),
        ({"state": RolloutState.COMPLETED, "stable": "chat@v9"}, "chat"),
    ],
)
def test_who_answers_in_each_state(changes: dict[str, object], expected: str) -> None:
    rollouts = {"chat": replace(ROLLOUT, **changes)}
    assert {VERSIONS.resolve("chat", key, rollouts) for key in KEYS[:50]} == {expected}


def test_when_the_first_version_is_gone_its_name_leads_to_another() -> None:
    versions = Versions(("chat@v2",))
    assert versions.resolve("chat", "r", {}) == "chat@v2"
    assert versions.resolve("chat@initial", "r", {}) is None


def test_names_that_stand_for_versions_are_reserved() -> None:
    check_label("chat@v2")
    check_label("chat")
    with pytest.raises(ConfigError, match="The version stable of 'chat@stable' is reserved"):
        check_label("chat@stable")
