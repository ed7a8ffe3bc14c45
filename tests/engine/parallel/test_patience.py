"""Watch of waits that take too long: another thread ends them."""

from __future__ import annotations

import gc
import threading
import weakref

from millrace.engine.parallel.lead import Patience


def test_a_wait_that_takes_too_long_is_given_up_once() -> None:
    given_up = threading.Event()
    reasons: list[str] = []

    def give_up(why: str) -> None:
        reasons.append(why)
        given_up.set()

    patience = Patience(0.05, give_up)
    with patience.waiting():
        assert given_up.wait(10.0)
    assert reasons == ["a rank did not come to an exchange within 0.05 s"]


def test_waits_that_end_are_not_added_up() -> None:
    given_up = threading.Event()
    patience = Patience(1000.0, lambda _: given_up.set())
    for _ in range(3):
        with patience.waiting():
            assert not patience.is_over()
    assert not patience.is_over()
    assert not given_up.is_set()


def test_a_wait_within_a_wait_is_part_of_it() -> None:
    given_up = threading.Event()
    patience = Patience(0.05, lambda _: given_up.set())
    with patience.waiting():
        with patience.waiting():
            pass
        assert given_up.wait(10.0)


def test_thread_of_the_watch_ends_with_it() -> None:
    before = set(threading.enumerate())
    patience = Patience(1000.0, lambda _: None)
    [thread] = set(threading.enumerate()) - before
    gone = weakref.ref(patience)
    del patience
    gc.collect()
    assert gone() is None
    thread.join(10.0)
    assert not thread.is_alive()
