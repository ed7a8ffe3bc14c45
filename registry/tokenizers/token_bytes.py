"""Bytes of each token, computed from the decoder that tokenizer.json declares."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

REPLACEMENT = "\ufffd"
# Error handler for byte-fallback vocabularies: their decoder gives one U+FFFD for each invalid
# byte. Byte-level decoders give one for each broken character.
EACH_BYTE = "millrace-each-byte"
SUPPORTED_DECODERS = "ByteLevel, ByteFallback with Replace, Fuse and Strip, and Metaspace"
_METASPACE = "\u2581"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


class UnsupportedDecoderError(ValueError):
    """Decoder that does more than turn each token into bytes of its own."""


class TokenBytes(msgspec.Struct, frozen=True):
    """Table of the tokens' bytes. The text of ids is their joined ``pieces``, decoded as UTF-8 with
    ``errors``.

    ``pieces[id]`` is text if the token is whole characters, else its bytes; special tokens have
    theirs too. The first piece of a text comes from ``first_pieces`` instead, if given:
    sentencepiece-like vocabularies begin a word with a space, which a text's first word drops.
    """

    pieces: tuple[str | bytes, ...]
    errors: str
    first_pieces: tuple[str | bytes, ...] | None = None

    def decode(self, token_ids: Iterable[int], skipped: frozenset[int]) -> str:
        """Return the text of a whole sequence; ids in ``skipped`` or beyond the vocabulary add
        nothing.
        """
        size = len(self.pieces)
        kept = [i for i in token_ids if 0 <= i < size and i not in skipped and self.pieces[i]]
        pieces = [self.pieces[i] for i in kept]
        if self.first_pieces is not None and kept:
            pieces[0] = self.first_pieces[kept[0]]
        return b"".join(map(_as_bytes, pieces)).decode("utf-8", self.errors)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token within a text; empty for an id beyond the vocabulary."""
        return _as_bytes(self.pieces[token_id]) if 0 <= token_id < len(self.pieces) else b""

    def first_bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token at the beginning of a text."""
        pieces = self.pieces if self.first_pieces is None else self.first_pieces
        return _as_bytes(pieces[token_id]) if 0 <= token_id < len(pieces) else b""


def token_bytes(decoder: dict[str, Any] | None, tokens: Iterable[str | None]) -> TokenBytes:
    """Return the table for ``tokens`` (by id, None for a missing id) under tokenizer.json's
    ``decoder``.

    Raises:
        UnsupportedDecoderError: the decoder is not supported.
    """
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        to_bytes = _byte_level()
        return TokenBytes(_table(tokens, to_bytes), "replace")
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0], tokens)
    if "ByteFallback" in kinds:
        return _byte_fallback(steps, tokens)
    raise UnsupportedDecoderError(" + ".join(kinds) or "none")


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _table(
    tokens: Iterable[str | None], to_bytes: Callable[[str], bytes]
) -> tuple[str | bytes, ...]:
    return tuple("" if token is None else _whole_or_bytes(to_bytes(token)) for token in tokens)


def _as_bytes(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def _whole_or_bytes(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_level() -> Callable[[str], bytes]:
    """Return the inverse of GPT-2's printable alphabet.

    Bytes that print stand for themselves; the others follow from U+0100 on in order. A token with
    any other character is an added token and is kept as it is.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + at): byte for at, byte in enumerate(others)}

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode()

    return to_bytes


def _metaspace(step: dict[str, Any], tokens: Iterable[str | None]) -> TokenBytes:
    tokens = list(tokens)
    mark = step.get("replacement", _METASPACE)
    pieces = _table(tokens, lambda token: token.replace(mark, " ").encode())
    if step.get("prepend_scheme", "always") == "never":
        return TokenBytes(pieces, "replace")
    first_pieces = _table(tokens, lambda token: token.replace(mark, "").encode())
    return TokenBytes(pieces, "replace", first_pieces)


def _byte_fallback(steps: list[dict[str, Any]], tokens: Iterable[str | None]) -> TokenBytes:
    replacements: list[tuple[str, str]] = []
    strips = 0
    fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                not fused
            ):
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                strips += start
            case {"type": "ByteFallback"} if not fused:
                pass
            case {"type": "Fuse"}:
                fused = True
            case _:
                raise UnsupportedDecoderError(f"{step['type']} within ByteFallback")
    if strips > 1:
        raise UnsupportedDecoderError("Strip of more than one space")

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _byte_token(token)
        return token.encode() if byte is None else byte

    pieces = _table(tokens, to_bytes)
    if not strips:
        return TokenBytes(pieces, EACH_BYTE)
    first_pieces = tuple(
        piece.removeprefix(" ") if isinstance(piece, str) else piece for piece in pieces
    )
    return TokenBytes(pieces, EACH_BYTE, first_pieces)


def _byte_token(token: str) -> bytes | None:
    """Return the byte of a token such as ``<0x0A>``."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None
