"""Which workers have which prefixes in their KV caches, as far as they said."""

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

# Entries that are out of date stay in a worker's list until there are this many more than keys.
_SLACK = 256


class _Holder:
    """One worker. ``order`` has its keys, the longest unused first; some may be there twice, or not
    be its own any more; ``digest`` is all of them under exclusive or. ``number`` is that of its
    last report, ``missed``: one before that did not come."""

    __slots__ = ("bit", "digest", "missed", "num_keys", "number", "order")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.number = 0
        self.missed = True
        self.num_keys = 0
        self.digest = 0
        self.order = array("Q")


class PrefixIndex:
    """Keys by the set of workers that have them. Pure.

    At most ``max_keys`` are known, each counted once for every worker that has it; where workers
    have more, each is left an equal share, those that it used last as far as it said. 80 to 100
    bytes for a key that one worker has, 10 to 20 for each further one.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._masks: dict[int, int] = {}
        self._holders: dict[str, _Holder] = {}
        self._by_bit: dict[int, str] = {}
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    # --- what workers say ---

    def apply(self, report: PrefixReport) -> None:
        """Take in a report. After one that was missed, a worker has nothing as far as ``match``
        goes, until it reports the whole."""
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
                "dropped a report of prefixes that could not be read",
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
            # As nearly always: nothing that was not reported already, but for the order.
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
        """Whether it is new to the worker."""
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

    # --- who goes ---

    def drop(self, worker_id: str) -> None:
        """A worker is gone, and its cache with it."""
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            for key in holder.order:
                self._clear(holder, key)
            del self._by_bit[holder.bit]

    # --- what is asked ---

    def match(self, worker_ids: Iterable[str], keys: Sequence[int]) -> dict[str, int]:
        """How many of the leading keys each of these workers has; those that have none are left
        out. Walks: a block in the middle may be gone."""
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
        """How many of a prompt's leading tokens each of these workers has in its cache; those that
        have none are left out."""
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
