"""Shares of tenants in the time for compiling grammars and in the room for compiled ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import msgspec
import pytest

from millrace.engine.grammar import compiler as grammar_compiler
from millrace.engine.grammar.compiler import GrammarCompiler
from millrace.engine.grammar.library import Matcher
from millrace.engine.grammar.probe import GrammarProbe
from millrace.engine.grammar.reasoning import ReasoningMatchers
from millrace.engine.step.sequence import Sequence
from millrace.engine.threads.tasks import FairTaskQueue, OwnedTask
from millrace.schemas.errors import GrammarError
from millrace.schemas.sampling import Grammar
from tests.engine.grammar.grammars import ask, helper_processes, regex, schema

_TIMEOUT_S = 30.0


class _Start:
    """Stand-in for a matcher."""

    complete = False

    def copy(self) -> _Start:
        return self

    def accept(self, _token_ids: tuple[int, ...]) -> None: ...


class _Compiling:
    """Compiler whose grammars beginning with "slow" wait for ``go_on``."""

    def __init__(self, num_helpers: int) -> None:
        self.go_on = threading.Event()
        self.compiled: list[str] = []
        self._settled = threading.Condition()
        self.compiler = GrammarCompiler(
            self._compile, ReasoningMatchers(_no_library), self._on_settled, num_helpers
        )

    def _compile(self, grammar: Grammar) -> Matcher:
        self.compiled.append(grammar.text)
        if grammar.text.startswith("slow"):
            assert self.go_on.wait(_TIMEOUT_S)
        return _Start()  # type: ignore[return-value]

    def _on_settled(self) -> None:
        with self._settled:
            self._settled.notify_all()

    def submit(self, tenant: str, text: str) -> Sequence:
        request = msgspec.structs.replace(ask(f"{tenant}-{text}", regex(text)), tenant=tenant)
        one = Sequence(request, arrival=0, key=0, max_total_tokens=100)
        self.compiler.submit([one])
        return one

    def wait(self, one: Sequence) -> None:
        with self._settled:
            assert self._settled.wait_for(lambda: one.ready, _TIMEOUT_S)


def _no_library() -> NoReturn:
    raise AssertionError


@pytest.fixture
def two_helpers() -> Iterator[_Compiling]:
    made = _Compiling(2)
    yield made
    made.go_on.set()


def test_another_tenant_s_grammar_waits_for_none_of_many_slow_ones(two_helpers: _Compiling) -> None:
    slow = [two_helpers.submit("a", f"slow{number}") for number in range(24)]
    two_helpers.wait(two_helpers.submit("b", "quick"))
    assert "slow1" not in two_helpers.compiled, "a tenant has one helper less than there are"
    two_helpers.go_on.set()
    for one in slow:
        two_helpers.wait(one)


def test_compiled_grammar_waits_for_no_helper(two_helpers: _Compiling) -> None:
    two_helpers.wait(two_helpers.submit("a", "quick"))
    for tenant in "ab":
        two_helpers.submit(tenant, f"slow-{tenant}")
    assert two_helpers.submit("c", "quick").ready


def test_the_tenant_with_the_most_grammars_gives_up_its_oldest(
    two_helpers: _Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_GRAMMARS", 4)
    two_helpers.wait(two_helpers.submit("b", "mine"))
    for number in range(9):
        two_helpers.wait(two_helpers.submit("a", f"theirs{number}"))
    assert two_helpers.submit("b", "mine").ready
    assert two_helpers.submit("a", "theirs8").ready
    two_helpers.wait(two_helpers.submit("a", "theirs0"))
    assert two_helpers.compiled.count("theirs0") == 2


# --- who is next ---


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def take(self, time_s: float) -> None:
        self.now_s += time_s


def _order(clock: _Clock, queue: FairTaskQueue, count: int, done: list[str]) -> list[str]:
    for _ in range(count):
        task = queue.get()
        assert task is not None
        task()
    return done


def _put(
    queue: FairTaskQueue, done: list[str], clock: _Clock, owner: str, time_s: float
) -> Callable[[], None]:
    def run() -> None:
        clock.take(time_s)
        done.append(owner)

    queue.put(OwnedTask(owner, run))
    return run


def test_owners_get_equal_time_and_not_equally_many_tasks() -> None:
    clock, done = _Clock(), list[str]()
    queue = FairTaskQueue(1, lambda: clock.now_s)
    put = partial(_put, queue, done, clock)
    for _ in range(20):
        put("slow", 4.0)
        put("quick", 1.0)
    assert "".join(one[0] for one in _order(clock, queue, 10, done)) == "sqqqqsqqqq"


def test_idle_owner_gains_no_credit_and_heavy_owner_keeps_its_debt() -> None:
    clock, done = _Clock(), list[str]()
    queue = FairTaskQueue(1, lambda: clock.now_s)
    put = partial(_put, queue, done, clock)
    for _ in range(8):
        put("busy", 1.0)
    put("greedy", 9.0)
    _order(clock, queue, 6, done)
    assert done == ["busy", "greedy", *["busy"] * 4]
    put("greedy", 9.0)
    put("late", 2.0)
    put("late", 2.0)
    _order(clock, queue, 6, done)
    assert done[6:] == ["late", "busy", "busy", "late", "busy", "greedy"]


def test_an_error_of_a_task_frees_the_owner_s_place() -> None:
    clock = _Clock()
    queue = FairTaskQueue(1, lambda: clock.now_s)

    def fail() -> None:
        raise ValueError("no")

    for _ in range(2):
        queue.put(OwnedTask("a", fail))
    for _ in range(2):
        task = queue.get()
        assert task is not None
        with pytest.raises(ValueError, match="no"):
            task()
    queue.put(None)
    assert queue.get() is None


# --- the helper ---


def test_a_grammar_that_takes_too_long_costs_no_helper() -> None:
    others = set(helper_processes())
    probe = GrammarProbe(num_helpers=2)
    probe.check(regex("a"))
    before = set(helper_processes()) - others
    assert len(before) == 2
    with pytest.raises(GrammarError, match="too long"):
        probe.check(schema({"type": "integer", "multipleOf": 99_999_999}))
    probe.check(regex("b"))
    assert set(helper_processes()) - others == before
    probe.close()
