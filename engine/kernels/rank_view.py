"""Memory that the compiled kernels share with ranks and links, see native/ranks.h, without torch.

A process learns from it what to load before it imports torch.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

MAX_RANKS = 16
# Size of RankHeader of ranks.h, in whole pages.
HEADER_BYTES = mmap.PAGESIZE
# Parts of ``failure`` in ranks.h.
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
    """Failure of the group, which cannot compute any more; the message has the reason."""


class RankView(ctypes.Structure):
    """View of a group: ``Ranks`` of ranks.h."""

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
    """Load the functions of ranks.h."""
    loaded = ctypes.CDLL(str(library))
    for name, argument_types in _SIGNATURES.items():
        getattr(loaded, name).argtypes = argument_types
    return loaded
