"""The adapters of one worker, as a scheduler sees them."""

from __future__ import annotations

from collections import Counter

from millrace.schemas.control import WorkerStatus

# What the load of an adapter takes where none was measured.
_LOAD_S = 0.1


class AdapterSlots:
    """What the last heartbeat said, and the adapters of requests that were sent there since. By
    version."""

    def __init__(self) -> None:
        self._num_slots = 0
        self._load_s = _LOAD_S
        self._num_running: dict[str, int] = {}
        self._sent: Counter[str] = Counter()

    def observe(self, status: WorkerStatus) -> None:
        """Take in a later heartbeat."""
        self._num_slots = status.max_adapters
        self._load_s = status.adapter_load_ms / 1e3 or _LOAD_S
        self._num_running = {one.version: one.num_running for one in status.adapters}

    def send(self, version: str) -> None:
        """A request of the adapter goes there."""
        self._sent[version] += 1

    def end(self, version: str) -> None:
        """It has ended."""
        self._sent[version] -= 1
        if not self._sent[version]:
            del self._sent[version]

    def has(self, version: str) -> bool:
        """Whether it has the adapter, or will for somebody else."""
        return version in self._num_running or version in self._sent

    def wait_s(self, version: str, request_s: float) -> float:
        """How long a request waits for its adapter: not at all where it is there, else for the
        load, and where requests hold every slot, for the end of one, which takes ``request_s``
        together with as many as there are slots."""
        if self.has(version):
            return 0.0
        held = {one for one, count in self._num_running.items() if count} | self._sent.keys()
        if len(held) < self._num_slots:
            return self._load_s
        return self._load_s + request_s / max(self._num_slots, 1)
