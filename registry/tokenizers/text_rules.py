"""Rules about untokenized texts that follow from a tokenizer's own file.

Both rules are given only if they hold for every text. A tokenizer with unknown features has
neither, and its texts are tokenized whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# The pattern of ByteLevel.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = _CONTRACTIONS + "|" + _LETTERS + r"\p{N}{1,3}" + _TAIL
QWEN_2 = _CONTRACTIONS + "|" + _LETTERS + r"\p{N}" + _TAIL
# Canonical composition turns at most three bytes of UTF-8 into one.
_COMPOSED_BYTES = 3
_NUM_BYTES = 256
# These patterns have no look-behind, and no match in which a letter is followed by a space or by
# punctuation.
_LETTERS_STAND_ALONE = (GPT_2, LLAMA_3, QWEN_2)
_CUT = re.compile(
    r"[A-Za-z](?=[ \n])|[\u4e00-\u9fff\u3041-\u3096\u30a1-\u30fa]"
    r"(?=[\u3001\u3002\uff0c\uff01\uff1b\uff1f])"
)


class TextRules(NamedTuple):
    """Rules for cutting and counting texts.

    ``longest_token_bytes``: no token stands for more bytes of a text's UTF-8. ``cut`` finds
    characters after which a text may be cut: the tokens of both sides are the tokens of the whole.
    """

    longest_token_bytes: int | None = None
    cut: re.Pattern[str] | None = None

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of a text; 0 if unknown."""
        if self.longest_token_bytes is None:
            return 0
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        return -(-num_bytes // self.longest_token_bytes)

    def pieces(self, text: str, num_characters: int) -> Iterator[str]:
        """Yield the text in pieces of about ``num_characters``, or longer where it cannot be
        cut.
        """
        start = 0
        while start < len(text):
            found = self.cut.search(text, start + num_characters) if self.cut is not None else None
            end = len(text) if found is None else found.end()
            yield text[start:end]
            start = end


def text_rules(
    spec: dict[str, Any], tokens: Sequence[str | None], pieces: Sequence[bytes]
) -> TextRules:
    """Return the rules for a tokenizer.json.

    Args:
        spec: the content of tokenizer.json.
        tokens: the tokens' spellings there, by id.
        pieces: the bytes that each token stands for, by id.
    """
    normalizers = _flatten(spec.get("normalizer"), "normalizers")
    splitters = _flatten(spec.get("pre_tokenizer"), "pretokenizers")
    added = spec.get("added_tokens") or []
    if not (
        all(map(_keeps_text, normalizers))
        and all(map(_splits_only, splitters))
        and _knows_every_byte(spec["model"], splitters, pieces)
        and not any(token.get("lstrip") or token.get("rstrip") for token in added)
    ):
        return TextRules()
    longest = max(map(len, pieces))
    if not _is_byte_level(splitters):
        # A text may contain the mark itself, which is longer than the space that it stands for.
        longest = max(longest, *(len((token or "").encode()) for token in tokens))
    if any(step["type"] == "NFC" for step in normalizers):
        longest *= _COMPOSED_BYTES
    can_be_cut = (
        all(step["type"] == "NFC" for step in normalizers)
        and _ends_words_at_letters(splitters)
        and not any(token.get("single_word") or _CUT.search(token["content"]) for token in added)
    )
    return TextRules(longest, _CUT if can_be_cut else None)


def _flatten(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [one for part in step[inner] for one in _flatten(part, inner)]
    return [step]


def _keeps_text(normalizer: dict[str, Any]) -> bool:
    match normalizer:
        case {"type": "NFC" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": str(mark)}:
            return bool(mark)
        case _:
            return False


def _splits_only(splitter: dict[str, Any]) -> bool:
    match splitter:
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case _:
            return False


def _is_byte_level(splitters: Sequence[dict[str, Any]]) -> bool:
    return any(step["type"] == "ByteLevel" for step in splitters)


def _knows_every_byte(
    model: dict[str, Any], splitters: Sequence[dict[str, Any]], pieces: Sequence[bytes]
) -> bool:
    """Return whether no part of a text can become one unknown token, or no token."""
    is_complete = model.get("byte_fallback") or _is_byte_level(splitters)
    return bool(
        model["type"] == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and is_complete
        and len({piece for piece in pieces if len(piece) == 1}) == _NUM_BYTES
    )


def _ends_words_at_letters(splitters: Sequence[dict[str, Any]]) -> bool:
    """Return whether a letter always ends a word unless another letter follows, and no token
    crosses words.
    """
    match splitters:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return True
        case [
            {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern in _LETTERS_STAND_ALONE
        case _:
            return False
