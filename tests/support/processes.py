"""The processes that another process started."""

from __future__ import annotations

import psutil


def children_by_age(pid: int) -> list[psutil.Process]:
    """Return the children of a process, the oldest first. Process ids do not tell the age: they
    start again at a low number after the highest one (32,768 on many machines)."""
    children = psutil.Process(pid).children()
    return sorted(children, key=lambda child: (child.create_time(), child.pid))
