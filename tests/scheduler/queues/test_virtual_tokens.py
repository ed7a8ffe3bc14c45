"""Counters of service: the bound of the paper, and no claims from having asked for nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.scheduler.queues.fair_queue import LazyMin, VirtualTokens


def test_a_newcomer_starts_where_the_least_served_is() -> None:
    tokens: VirtualTokens[str] = VirtualTokens()
    tokens.begin("old")
    tokens.charge("old", 1_000)
    tokens.begin("new")
    assert tokens.counter("new") == 1_000


def test_a_pause_is_no_claim_and_forgives_no_debt() -> None:
    tokens: VirtualTokens[str] = VirtualTokens()
    for name in ("a", "b"):
        tokens.begin(name)
    tokens.charge("a", 500)
    tokens.end("a")
    tokens.charge("b", 100)
    tokens.begin("a")
    assert tokens.counter("a") == 500, "what it had is not forgotten"
    tokens.end("b")
    tokens.charge("a", 1_000)
    tokens.begin("b")
    assert tokens.counter("b") == 1_500, "a pause is not saved up"


def test_when_nobody_wanted_it_goes_on_where_the_last_one_stopped() -> None:
    tokens: VirtualTokens[str] = VirtualTokens()
    tokens.begin("a")
    tokens.charge("a", 300)
    tokens.end("a")
    tokens.begin("b")
    assert tokens.counter("b") == 300


def test_an_overcharge_is_refunded() -> None:
    tokens: VirtualTokens[str] = VirtualTokens()
    tokens.begin("a")
    tokens.charge("a", 100)
    tokens.charge("a", -40)
    tokens.end("a")
    tokens.charge("a", -10)
    assert tokens.counter("a") == 50


def test_a_refund_from_before_a_pause_is_no_claim() -> None:
    """A tenant lifted meanwhile gets no refund of an earlier overcharge."""
    tokens: VirtualTokens[str] = VirtualTokens()
    tokens.begin("a")
    tokens.begin("b")
    tokens.charge("a", 1_000)
    tokens.end("a")
    tokens.charge("b", 5_000)
    tokens.begin("a")
    tokens.charge("a", 100)
    tokens.charge("a", -1_000)
    assert tokens.counter("a") == 5_000
    tokens.charge("a", 30)
    tokens.charge("a", -20)
    assert tokens.counter("a") == 5_010


def test_members_who_want_nothing_are_forgotten_in_turn() -> None:
    tokens: VirtualTokens[int] = VirtualTokens(max_idle=3)
    for number in range(5):
        tokens.begin(number)
        tokens.charge(number, 10)
    for number in range(5):
        tokens.end(number)
    assert len(tokens._idle) == 3


@given(
    costs=st.lists(st.floats(1, 100), min_size=30, max_size=80),
    num_members=st.integers(2, 6),
)
def test_backlogged_members_stay_within_the_bound(costs: list[float], num_members: int) -> None:
    """No member is ahead by more than the largest single cost if the least served goes first."""
    tokens: VirtualTokens[int] = VirtualTokens()
    for member in range(num_members):
        tokens.begin(member)
    for cost in costs:
        least = min(range(num_members), key=tokens.counter)
        tokens.charge(least, cost)
        counters = [tokens.counter(member) for member in range(num_members)]
        assert max(counters) - min(counters) <= 100


_OPERATIONS = st.lists(
    st.tuples(st.sampled_from("sd"), st.integers(0, 6), st.integers(0, 9)), max_size=200
)


@given(_OPERATIONS)
def test_lazy_min_returns_the_minimum(operations: list[tuple[str, int, int]]) -> None:
    lazy: LazyMin[int] = LazyMin()
    plain: dict[int, tuple[int, int]] = {}
    for number, (name, key, value) in enumerate(operations):
        if name == "s":
            lazy.set(key, value)
            if key not in plain or plain[key][0] != value:
                plain[key] = (value, number)
        else:
            lazy.discard(key)
            plain.pop(key, None)
        assert lazy.least() == min(plain, key=lambda k: plain[k], default=None)
        assert len(lazy) == len(plain)
