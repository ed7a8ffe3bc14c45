"""``--workers`` and ``--autoscale MIN:MAX``: how many workers a model has, and may have."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from millrace.schemas.config import AutoscaleConfig
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import ConfigError, MillraceError


class FirstWorkers(NamedTuple):
    """How many workers a model has at first, and their roles; empty: each has both."""

    number: int
    roles: tuple[WorkerRole, ...] = ()


def workers_option(text: str) -> FirstWorkers:
    """``N``, or as many of each role as in ``prefill:1,decode:2``. Raises ArgumentTypeError."""
    if re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        return FirstWorkers(int(text))
    roles: list[WorkerRole] = []
    for part in text.split(","):
        name, _, count = part.partition(":")
        if name not in set(WorkerRole) or not re.fullmatch(r"[1-9]\d{0,3}", count, re.ASCII):
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number nor ROLE:N,ROLE:N with roles of "
                f"{', '.join(WorkerRole)}, such as prefill:1,decode:2"
            )
        roles += [WorkerRole(name)] * int(count)
    return FirstWorkers(len(roles), tuple(roles))


def parse_bounds(text: str, at_most: int) -> tuple[int, int]:
    """MIN, which may be 0, and MAX, at least 1 and ``at_most``. Raises ConfigError."""
    matched = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if matched is None:
        raise ConfigError(f"--autoscale: {text!r} is not MIN:MAX, such as 1:4")
    fewest, most = int(matched[1]), int(matched[2])
    if not 1 <= most <= at_most:
        raise ConfigError(f"--autoscale: MAX must be between 1 and {at_most}, got {most}")
    if fewest > most:
        raise ConfigError(f"--autoscale: MIN is {fewest}, which is more than MAX, {most}")
    return fewest, most


def num_first(autoscale: AutoscaleConfig, asked: int | None) -> int:
    """Workers per model at first. One at least, since the start is over when each model has
    answered."""
    if not autoscale.is_on:
        return asked or 1
    if not 0 <= autoscale.min_workers <= autoscale.max_workers:
        raise ConfigError(
            f"scheduler.autoscale: min_workers is {autoscale.min_workers}, which is not between 0 "
            f"and max_workers, {autoscale.max_workers}."
        )
    if not 0 <= autoscale.warm <= autoscale.max_workers:
        raise ConfigError(
            f"scheduler.autoscale: warm is {autoscale.warm}, which is not between 0 and "
            f"max_workers, {autoscale.max_workers}."
        )
    if (asked or 1) > autoscale.max_workers:
        raise MillraceError(
            f"--workers {asked} is more than autoscaling allows, which is {autoscale.max_workers}"
        )
    return max(asked or 1, autoscale.min_workers)
