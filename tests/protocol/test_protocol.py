"""Protocol under random faults: no request is lost or answered twice.

Every stream continues where it stopped.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from millrace.registry.served import ServedModel
from tests.protocol.checks import check_now, come_to_rest
from tests.protocol.load import GATEWAYS, LENGTHS_TOKENS, LIVES_S, ask_something, keep_asking
from tests.protocol.processes import Process, Trap
from tests.protocol.system import System
from tests.workers.scripted import served_model

WORKERS = ("worker-1", "worker-2", "worker-3")
SCHEDULERS = ("scheduler-1", "scheduler-2")
_WORKER_DEEDS = ("tok", "record", "result", "ack", "_INBOX", "index", "ended", "hb", "release")
_SCHEDULER_DEEDS = ("pull", "worker", "cancel", "is_open", "record", "ack", "tok", "resume")
_GATEWAY_DEEDS = ("publish", "_INBOX", "worker", "handover", "cancel")


def _traps(*deeds: str) -> st.SearchStrategy[tuple[str, bool]]:
    """Draw an action, and whether the process dies before or after it."""
    return st.tuples(st.sampled_from(deeds), st.booleans())


_numbers = st.integers(0, 2**32)
_waits_s = st.sampled_from((0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 2.5, 7.0))


@cache
def _model() -> ServedModel:
    return served_model(Path(tempfile.mkdtemp(prefix="millrace-protocol-")))


class Protocol(RuleBasedStateMachine):
    """Faults and requests in any order.

    Dead parts restart only by a rule, or at the end, when all faults are repaired and all requests
    have to end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.system: System | None = None
        self.load: asyncio.Task[None] | None = None

    @property
    def it(self) -> System:
        assert self.system is not None
        return self.system

    @initialize(
        seed=_numbers,
        num_schedulers=st.integers(1, 2),
        asks_per_s=st.sampled_from((0.0, 1.0, 4.0)),
        restarts_after_s=st.sampled_from((None, 0.3, 1.5)),
    )
    def begin(
        self, seed: int, num_schedulers: int, asks_per_s: float, restarts_after_s: float | None
    ) -> None:
        self.system = System(_model(), seed)
        for name in (*SCHEDULERS[:num_schedulers], *WORKERS[:2], *GATEWAYS):
            self.it.start(name)
        self.it.restarts_after_s = restarts_after_s
        self.it.pass_s(0.5)
        if asks_per_s:
            self.load = self.it.errand(keep_asking(self.it, asks_per_s))

    @invariant()
    def all_is_well(self) -> None:
        if self.system is not None:
            check_now(self.system)

    def teardown(self) -> None:
        if self.system is None:
            return
        try:
            self._make_whole()
            come_to_rest(self.system)
        finally:
            self.system.close()

    def _make_whole(self) -> None:
        it = self.it
        if self.load is not None:
            it.act(self.load.cancel)
        it.weather.share_lost = it.weather.share_twice = it.weather.delay_s = 0.0
        it.weather.reorders = it.index.is_away = False
        for process in it.processes():
            process.trap = None
            it.act(process.thaw)
            it.act(process.mend)
        for name in (*SCHEDULERS[:1], *WORKERS[:2], *GATEWAYS):
            self._start_if_dead(name)

    def _start_if_dead(self, name: str) -> None:
        if not self.it.lives(name):
            self.it.start(name)

    # --- load ---

    @rule(
        count=st.integers(1, 6),
        max_tokens=st.sampled_from(LENGTHS_TOKENS),
        lives_s=st.sampled_from(LIVES_S),
        gateway=st.sampled_from(GATEWAYS),
        is_for_nobody=st.booleans(),
        is_stored=st.booleans(),
        wait_s=_waits_s,
    )
    def ask(
        self,
        count: int,
        max_tokens: int,
        lives_s: float,
        gateway: str,
        is_for_nobody: bool,
        is_stored: bool,
        wait_s: float,
    ) -> None:
        for _ in range(count):
            ask_something(
                self.it,
                gateway,
                max_tokens,
                lives_s,
                is_for_nobody=is_for_nobody,
                is_stored=is_stored,
            )
        self.it.pass_s(wait_s)

    @rule(wait_s=_waits_s)
    def wait(self, wait_s: float) -> None:
        self.it.pass_s(wait_s)

    @precondition(lambda self: self.it.asked)
    @rule(number=_numbers, how=st.sampled_from(("cancel", "leave", "move")), to=_numbers)
    def disturb_one(self, number: int, how: str, to: int) -> None:
        asked = list(self.it.asked.values())[number % len(self.it.asked)]
        match how:
            case "cancel":
                self.it.cancel(asked)
            case "leave":
                self.it.leave(asked)
            case _:
                self.it.move(asked, GATEWAYS[to % len(GATEWAYS)])
        self.it.pass_s(0.0)

    # --- what happens to processes ---

    def _pick(self, number: int) -> Process | None:
        lives = self.it.processes()
        return lives[number % len(lives)] if lives else None

    @rule(number=_numbers, wait_s=_waits_s)
    def kill(self, number: int, wait_s: float) -> None:
        if (process := self._pick(number)) is not None:
            self.it.act(process.kill)
        self.it.pass_s(wait_s)

    @rule(name=st.sampled_from(WORKERS[:2]), trap=_traps(*_WORKER_DEEDS), wait_s=_waits_s)
    def trap_worker(self, name: str, trap: tuple[str, bool], wait_s: float) -> None:
        self._set_trap(name, trap, wait_s)

    @rule(name=st.sampled_from(SCHEDULERS), trap=_traps(*_SCHEDULER_DEEDS), wait_s=_waits_s)
    def trap_scheduler(self, name: str, trap: tuple[str, bool], wait_s: float) -> None:
        self._set_trap(name, trap, wait_s)

    @rule(name=st.sampled_from(GATEWAYS), trap=_traps(*_GATEWAY_DEEDS), wait_s=_waits_s)
    def trap_gateway(self, name: str, trap: tuple[str, bool], wait_s: float) -> None:
        self._set_trap(name, trap, wait_s)

    def _set_trap(self, name: str, trap: tuple[str, bool], wait_s: float) -> None:
        kind, is_after = trap
        for process in self.it.processes():
            if process.name == name:
                process.trap = Trap(kind, is_after=is_after)
        self.it.pass_s(wait_s)

    @rule(number=_numbers, for_s=_waits_s, wait_s=_waits_s)
    def freeze(self, number: int, for_s: float, wait_s: float) -> None:
        if (process := self._pick(number)) is not None:
            process.freeze()
            self.it.pass_s(for_s)
            self.it.act(process.thaw)
        self.it.pass_s(wait_s)

    @rule(number=_numbers, for_s=_waits_s, wait_s=_waits_s)
    def cut_off(self, number: int, for_s: float, wait_s: float) -> None:
        if (process := self._pick(number)) is not None:
            process.cut()
            self.it.pass_s(for_s)
            self.it.act(process.mend)
        self.it.pass_s(wait_s)

    @rule(name=st.sampled_from(WORKERS), wait_s=_waits_s)
    def drain(self, name: str, wait_s: float) -> None:
        if name in self.it.workers:
            self.it.workers[name].stopping.set()
        self.it.pass_s(wait_s)

    @rule(name=st.sampled_from(SCHEDULERS), wait_s=_waits_s)
    def stop_scheduler(self, name: str, wait_s: float) -> None:
        if name in self.it.schedulers:
            self.it.schedulers[name].stopping.set()
        self.it.pass_s(wait_s)

    @rule(name=st.sampled_from(WORKERS), wait_s=_waits_s)
    def kill_engine(self, name: str, wait_s: float) -> None:
        life = self.it.workers.get(name)
        if life is not None and life.process.is_alive:
            self.it.act(life.engine._stepping.cancel)
        self.it.pass_s(wait_s)

    @rule(name=st.sampled_from(WORKERS + SCHEDULERS + GATEWAYS), wait_s=_waits_s)
    def start(self, name: str, wait_s: float) -> None:
        self._start_if_dead(name)
        self.it.pass_s(wait_s)

    # --- what happens to the servers and the network ---

    @rule(for_s=_waits_s, is_forgetful=st.booleans(), wait_s=_waits_s)
    def restart_the_server(self, for_s: float, is_forgetful: bool, wait_s: float) -> None:
        it = self.it
        it.broker.stop()
        it.pass_s(for_s)
        if is_forgetful:
            it.broker.jobs.lose_deliveries()
        it.act(it.broker.start)
        it.pass_s(wait_s)

    @rule(is_away=st.booleans())
    def redis(self, is_away: bool) -> None:
        self.it.index.is_away = is_away
        self.it.index.was_away |= is_away

    @rule(
        delay_s=st.sampled_from((0.0, 0.0, 0.01, 0.1, 0.5)),
        share_twice=st.sampled_from((0.0, 0.2)),
        share_lost=st.sampled_from((0.0, 0.02, 0.2)),
        reorders=st.booleans(),
    )
    def weather(
        self, delay_s: float, share_twice: float, share_lost: float, reorders: bool
    ) -> None:
        weather = self.it.weather
        weather.delay_s, weather.share_twice = delay_s, share_twice
        weather.share_lost, weather.reorders = share_lost, reorders


# The same few lives each time, or as many others as are asked for. A life is found again by its
# blob; making it shorter takes minutes.
_WANTED = os.environ.get("MILLRACE_PROTOCOL_EXAMPLES", "")

TestProtocol = pytest.mark.timeout(0 if _WANTED else 300)(Protocol.TestCase)
TestProtocol.settings = settings(
    max_examples=int(_WANTED or 60),
    stateful_step_count=int(os.environ.get("MILLRACE_PROTOCOL_STEPS", "25")),
    derandomize=not _WANTED,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=tuple(Phase) if "MILLRACE_PROTOCOL_SHRINK" in os.environ else (Phase.generate,),
    report_multiple_bugs=False,
)
