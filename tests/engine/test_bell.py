"""Bell that wakes the stepping thread."""

from __future__ import annotations

import select
import threading

from millrace.engine.threads.tasks import Bell


def _can_be_read(bell: Bell) -> bool:
    return bool(select.select([bell.fd], [], [], 0)[0])


def test_bell_stays_rung_until_it_is_cleared() -> None:
    bell = Bell()
    assert not _can_be_read(bell)
    bell.ring()
    bell.ring()
    bell.wait(60.0)
    assert _can_be_read(bell)
    bell.clear()
    bell.clear()
    assert not _can_be_read(bell)


def test_ring_wakes_the_waiting_thread() -> None:
    bell = Bell()
    thread = threading.Thread(target=bell.ring)
    thread.start()
    assert select.select([bell.fd], [], [], 60.0)[0]
    thread.join()
