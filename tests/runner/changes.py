"""Reads the change that is tested from git."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

_SETTLED = "6 hours ago"


class NoHistoryError(Exception):
    """Missing history: the checkout has no base commit for the change."""


@dataclass(frozen=True)
class Change:
    """Change: paths that differ from a commit, relative to the repository's root."""

    base: str
    paths: tuple[str, ...]
    deleted: tuple[str, ...]


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return the output of a git command in the repository. Raise NoHistoryError if git fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoHistoryError(f"git {' '.join(arguments)} failed: {error}") from error
    return done.stdout.strip()


def default_base(root: Path = ROOT) -> str:
    """Return the base commit of the change: the commit at which this branch left ``origin/main``,
    or else the newest commit that is over six hours old.

    A clone of the tested commit has left ``origin/main`` nowhere, so that its second rule holds.
    Raise NoHistoryError for a shallow clone, a folder without git, or a younger repository.
    """
    if git("rev-parse", "--is-shallow-repository", root=root) == "true":
        raise NoHistoryError("The clone is shallow: it has no commit to compare with.")
    head = git("rev-parse", "HEAD", root=root)
    try:
        left_at = git("merge-base", "origin/main", "HEAD", root=root)
    except NoHistoryError:
        left_at = head  # there is no such branch
    if left_at != head:
        return left_at
    settled = git("rev-list", "-1", f"--before={_SETTLED}", "HEAD", root=root)
    if not settled:
        raise NoHistoryError("Each commit is younger than six hours.")
    return settled


def change_since(base: str, root: Path = ROOT) -> Change:
    """Return all differences from ``base``: commits, the working tree and files that git does not
    track yet. Raise NoHistoryError if there is no such commit."""
    base = git("rev-parse", "--verify", f"{base}^{{commit}}", root=root)
    changed = set(git("diff", "--name-only", "--no-renames", base, root=root).splitlines())
    changed |= set(git("ls-files", "--others", "--exclude-standard", root=root).splitlines())
    deleted = {path for path in changed if not (root / path).exists()}
    return Change(base, tuple(sorted(changed)), tuple(sorted(deleted)))


def commit_hash(root: Path = ROOT) -> str | None:
    """Return the hash of the commit that is checked out, or None without git."""
    try:
        return git("rev-parse", "HEAD", root=root)
    except NoHistoryError:
        return None
