"""Integers of 4 or 8 bits that lie side by side in int32, as checkpoints pack them."""

from __future__ import annotations

import torch

_WORD_BITS = 32
# AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 of each eight from the lowest bits to the highest.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def num_words(num_codes: int, bits: int) -> int:
    """How many int32 hold ``num_codes``."""
    return -(-num_codes * bits // _WORD_BITS)


def unpacked(words: torch.Tensor, bits: int, num_codes: int) -> torch.Tensor:
    """Signed codes: int8 [num_rows, num_codes] of int32 ``words`` [num_rows, num_words].

    The first code is in the lowest bits; stored are codes plus half their range.
    """
    stored = words.contiguous().view(torch.uint8)
    if bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(1)
        return (stored[:, :num_codes].view(torch.int8) - 8).contiguous()
    return (stored[:, :num_codes] ^ 128).view(torch.int8).contiguous()


def unpacked_by_awq(words: torch.Tensor, num_codes: int) -> torch.Tensor:
    """The same of 4 bits in AutoAWQ's order."""
    codes = unpacked(words, 4, num_codes)
    eights = codes.view(len(codes), -1, len(_AWQ_PLACES))
    return eights[..., list(_AWQ_PLACES)].flatten(1)


def plus_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """``words`` whose every code is one more.

    A zero point of 0 is stored as -1 by GPTQModel, which takes 1 from each code in one subtraction
    of whole words; one addition undoes the borrows, too.
    """
    return words + sum(1 << place for place in range(0, _WORD_BITS, bits))
