"""Triton's interpreter, made to prepare itself once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def prepare_once() -> None:
    """Leave Triton's language as the interpreter makes it for a module's kernels. It looks through
    the whole language at each launch and at each call of a function, which takes it longer than
    most kernels do. For processes that compile no kernel."""
    own = interpreter._patch_lang
    if own.__module__ == __name__:
        return
    # The globals are kept, so that no other module's can be where they were.
    prepared: dict[int, dict[str, Any]] = {}
    kept = SimpleNamespace(restore=lambda: None)

    def prepare(function: Any) -> SimpleNamespace:
        names = function.__globals__
        if id(names) not in prepared:
            prepared[id(names)] = names
            own(function)
        return kept

    interpreter._patch_lang = prepare
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)


def _remembered(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``own``, which makes a dictionary of all types for each that it is asked for."""
    of_numbers = cache(own)

    def numpy_type(type_: Any) -> Any:
        element = type_.element_ty if type(type_) is tl.block_type else type_
        return of_numbers(element) if type(element) is tl.dtype else own(element)

    return numpy_type
