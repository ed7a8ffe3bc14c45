"""Errors that client libraries were seen to raise when they connect, and do not document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

BROKEN = [
    RuntimeError("unable to perform operation on <TCPTransport closed=True>; it is closed"),
    AttributeError("'NoneType' object has no attribute 'get_extra_info'"),
    asyncio.CancelledError(),
]

# For a test that has the error as its argument ``broken``.
each_broken = pytest.mark.parametrize("broken", BROKEN, ids=lambda error: type(error).__name__)


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """Return a function that raises ``error``, to replace a function that connects."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail
