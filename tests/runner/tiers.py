"""Choice of the slow tier's tests for a run.

The fast tier is every test without the marker ``slow``. `make test` takes the fast tier, slow tests
in the import closure of the change, and a tenth of the other slow tests, which differs from commit
to commit. `make test-all`, and plain pytest, take all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.runner.changes import NoHistoryError, change_since, commit_hash, default_base
from tests.runner.choice import Selector
from tests.runner.measured import Measured

SHARES = 10
MOST_AFFECTED_S = 240.0
_UNMEASURED_S = 10.0


@dataclass(frozen=True)
class SlowShare:
    """Choice of slow tests as plain data, which pytest-xdist hands to its processes."""

    share: int
    """Slow tests of this one of ten shares run."""
    distances: dict[str, int]
    """Test files in the import closure of the change, and how many imports lie between."""

    @classmethod
    def of_checkout(cls, base: str | None = None) -> SlowShare:
        """Return the share of the commit that is checked out, and the test files that the change
        since ``base`` affects. Without history, no test counts as affected. Raise UsageError for a
        ``base`` that is no commit."""
        digest = commit_hash()
        share = int(digest, 16) % SHARES if digest else 0
        try:
            change = change_since(base or default_base())
        except NoHistoryError as error:
            if base:
                raise pytest.UsageError(f"--base {base}: {error}") from error
            return cls(share, {})
        affected = Selector.of_repository(change.deleted).affected(change.paths, exact=True)
        return cls(share, {file: chosen.distance for file, chosen in affected.items()})


def share_of(node_id: str) -> int:
    """Return a slow test's share, one of ten, which is the same on every machine."""
    return int(hashlib.sha256(node_id.encode()).hexdigest(), 16) % SHARES


def slow_reason(item: pytest.Item) -> str | None:
    """Return the reason why a test is in the slow tier, or None for a fast test. Raise UsageError
    if a marker has no reason."""
    marker = item.get_closest_marker("slow")
    if marker is None:
        return None
    reason = marker.kwargs.get("reason")
    if not isinstance(reason, str) or not reason or marker.args:
        raise pytest.UsageError(f'{item.nodeid}: say why, as in @pytest.mark.slow(reason="…").')
    return reason


def taken(slow: Iterable[str], share: SlowShare, measured: Measured) -> set[str]:
    """Return the slow tests to run, out of these ids: the most affected ones, up to four minutes of
    measured CPU time, and the commit's share."""
    chosen = {node_id for node_id in slow if share_of(node_id) == share.share}

    def rank(node_id: str) -> tuple[int, str]:
        return share.distances[_file(node_id)], node_id

    left_s = MOST_AFFECTED_S
    for node_id in sorted((n for n in slow if _file(n) in share.distances), key=rank):
        left_s -= measured.slow_test_s.get(node_id, _UNMEASURED_S)
        if left_s < 0:
            break
        chosen.add(node_id)
    return chosen


def _file(node_id: str) -> str:
    return node_id.split("::", 1)[0]
