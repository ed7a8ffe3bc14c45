"""What the compiled kernels share with ranks and links, see native/ranks.h, and the functions that
work on it. Without torch: a process learns from it what to load before that is imported."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

MAX_RANKS = 16
# What RankHeader of ranks.h takes, in whole pages.
HEADER_BYTES = mmap.PAGESIZE
# See ``failure`` in ranks.h.
TIMED_OUT, RANK_SHIFT, REASON = 2, 8, 0xFF
_SIGNATURES = {
    "millrace_ranks_all_reduce": (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64),
    "millrace_ranks_meet": (ctypes.c_void_p, ctypes.c_int64),
    "millrace_ranks_post": (ctypes.c_void_p, ctypes.c_uint32),
    "millrace_ranks_await": (ctypes.c_void_p, ctypes.c_uint32),
    "millrace_ranks_set_word": (ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32),
    "millrace_ranks_await_word": (
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32),
        ctypes.c_int,
    ),
    "millrace_ranks_abort": (ctypes.c_void_p,),
}


class RanksFailedError(Exception):
    """The group can compute nothing any more; the message says why."""


class RankView(ctypes.Structure):
    """``Ranks`` of ranks.h."""

    _fields_ = (
        ("header", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("buffer_floats", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("brought", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("exchange", ctypes.c_uint32),
    )


def rank_functions(library: Path) -> ctypes.CDLL:
    """The functions of ranks.h."""
    loaded = ctypes.CDLL(str(library))
    for name, argument_types in _SIGNATURES.items():
        getattr(loaded, name).argtypes = argument_types
    return loaded
