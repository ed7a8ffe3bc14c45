"""Prefix index: the reported KV cache keys of each worker."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import xor

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.prompt_keys import PromptKeys, read_keys
from millrace.schemas.control import PrefixReport

logger = logging.getLogger(__name__)

# Stale entries of a worker's list are removed once there are this many more than keys.
_SLACK = 256


class _Holder:
    """Prefix keys of one worker.

    ``order`` has its keys, the least recently used first. It may contain duplicates and removed
    keys. ``digest`` is the exclusive or of all keys. ``number`` is that of the last report.
    ``missed``: an earlier report was lost.
    """

    __slots__ = ("bit", "digest", "missed", "num_keys", "number", "order")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.number = 0
        self.missed = True
        self.num_keys = 0
        self.digest = 0
        self.order = array("Q")


class PrefixIndex:
    """Index from prefix keys to the workers that have them. Pure.

    At most ``max_keys`` are kept, counted once for each worker. Beyond that, each worker keeps an
    equal share: its most recently used keys, as reported. A key takes 80 to 100 bytes for its first
    worker and 10 to 20 for each further one.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._masks: dict[int, int] = {}
        self._holders: dict[str, _Holder] = {}
        self._by_bit: dict[int, str] = {}
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    # --- reports ---

    def apply(self, report: PrefixReport) -> None:
        """Apply a report.

        After a lost report, ``match`` finds nothing of the worker until its next whole report.
        """
        holder = self._holders.get(report.worker_id)
        if holder is None:
            holder = self._add(report.worker_id)
        if report.number <= holder.number:
            return
        has_gap = report.number != holder.number + 1
        holder.number = report.number
        holder.missed = not report.whole and (holder.missed or has_gap)
        if holder.missed:
            return
        try:
            added, removed = read_keys(report.added), read_keys(report.removed)
        except ValueError:
            holder.missed = True
            logger.warning(
                "dropped an unreadable prefix report",
                extra={"worker_id": report.worker_id},
            )
            return
        if report.whole:
            added.reverse()
            self._replace(holder, added)
        else:
            self._change(holder, added, removed)
        if self._num_keys > self._max_keys:
            self._trim()

    def _add(self, worker_id: str) -> _Holder:
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        holder = self._holders[worker_id] = _Holder(bit)
        self._by_bit[bit] = worker_id
        return holder

    def _replace(self, holder: _Holder, keys: list[int]) -> None:
        if len(keys) == holder.num_keys and reduce(xor, keys, 0) == holder.digest:
            # The usual case: a whole report changes only the order.
            holder.order = array("Q", keys)
            return
        last = dict.fromkeys(keys)
        for key in [key for key in holder.order if key not in last]:
            self._clear(holder, key)
        has, bit = self._masks.get, holder.bit
        for key in [key for key in last if not has(key, 0) & bit]:
            self._set(holder, key)
        holder.order = array("Q", last)

    def _change(self, holder: _Holder, added: list[int], removed: list[int]) -> None:
        for key in removed:
            self._clear(holder, key)
        holder.order.extend([key for key in added if self._set(holder, key)])
        if len(holder.order) > 2 * holder.num_keys + _SLACK:
            self._compact(holder)

    def _compact(self, holder: _Holder) -> None:
        masks, bit = self._masks, holder.bit
        last = dict.fromkeys(key for key in reversed(holder.order) if masks.get(key, 0) & bit)
        holder.order = array("Q", reversed(last))

    def _set(self, holder: _Holder, key: int) -> bool:
        """Add a key; return whether it is new to the worker."""
        mask = self._masks.get(key)
        if mask is None:
            self._masks[key] = holder.bit
        elif mask & holder.bit:
            return False
        else:
            self._masks[key] = mask | holder.bit
        holder.digest ^= key
        holder.num_keys += 1
        self._num_keys += 1
        return True

    def _clear(self, holder: _Holder, key: int) -> None:
        mask = self._masks.get(key, 0)
        if not mask & holder.bit:
            return
        if mask == holder.bit:
            del self._masks[key]
        else:
            self._masks[key] = mask ^ holder.bit
        holder.digest ^= key
        holder.num_keys -= 1
        self._num_keys -= 1

    def _trim(self) -> None:
        share = self._max_keys // len(self._holders)
        for holder in self._holders.values():
            if holder.num_keys > share:
                num_looked_at = 0
                for key in holder.order:
                    if holder.num_keys == share:
                        break
                    num_looked_at += 1
                    self._clear(holder, key)
                del holder.order[:num_looked_at]

    # --- departures ---

    def drop(self, worker_id: str) -> None:
        """Forget a worker that is gone with its cache."""
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            for key in holder.order:
                self._clear(holder, key)
            del self._by_bit[holder.bit]

    # --- lookups ---

    def match(self, worker_ids: Iterable[str], keys: Sequence[int]) -> dict[str, int]:
        """Return how many leading keys each worker has; workers without any are left out.

        Stops at the first missing key: a block in the middle may be gone.
        """
        holders = self._holders
        asked = 0
        for worker_id in worker_ids:
            holder = holders.get(worker_id)
            if holder is not None and not holder.missed:
                asked |= holder.bit
        found: dict[str, int] = {}
        masks, num_blocks = self._masks, 0
        for key in keys:
            mask = masks.get(key, 0) & asked
            if mask != asked:
                if num_blocks:
                    self._note(found, asked ^ mask, num_blocks)
                asked = mask
                if not asked:
                    return found
            num_blocks += 1
        if num_blocks:
            self._note(found, asked, num_blocks)
        return found

    def _note(self, found: dict[str, int], bits: int, num_blocks: int) -> None:
        while bits:
            bit = bits & -bits
            found[self._by_bit[bit]] = num_blocks
            bits ^= bit

    def cached_tokens(self, workers: Iterable[WorkerView], prompt: PromptKeys) -> dict[str, int]:
        """Return how many leading tokens of a prompt each worker has cached, without zeros."""
        if not self._masks:
            return {}
        by_kind: dict[tuple[int, bool], list[str]] = {}
        for worker in workers:
            status = worker.status
            kind = (status.block_size_tokens, status.prefix_salted)
            by_kind.setdefault(kind, []).append(status.worker_id)
        cached: dict[str, int] = {}
        for (size, salted), worker_ids in by_kind.items():
            found = self.match(worker_ids, prompt.of(size, salted=salted))
            for worker_id, num_blocks in found.items():
                cached[worker_id] = num_blocks * size
        return cached
