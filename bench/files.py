"""Each connection is a file, of which a process may have few unless it asks."""

from __future__ import annotations

import resource


def allow_many_files() -> int:
    """Raise this process's limit of open files as far as it may go; the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
