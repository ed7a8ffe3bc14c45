"""What a model's text turns out to be."""

from __future__ import annotations

from typing import NamedTuple


class ContentPiece(NamedTuple):
    """Text for the reader; never empty."""

    text: str


class CallPiece(NamedTuple):
    """A call begins: the ``call``-th of the text, from 0."""

    call: int
    call_id: str
    name: str


class ArgumentsPiece(NamedTuple):
    """More of a call's arguments, as the model writes them; never empty."""

    call: int
    text: str


Piece = ContentPiece | CallPiece | ArgumentsPiece
