"""Tokenizer of prompts that never turns content into a control token."""

from __future__ import annotations

import copy
import json
import re
import secrets
import unicodedata
from functools import lru_cache
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, models

from millrace.registry.template_text import TemplateText
from millrace.registry.tokenizers.long_texts import ids_of

_OTHER_TEXT = "\0"
_SPACE_MARK = "\u2581"
# Templates have few literals; the control tokens in each are searched for once.
_MAX_KNOWN_RUNS = 512
_WORD = re.compile(r"\w")


class _Found(NamedTuple):
    start: int
    end: int
    token_id: int


class ContentTokenizer:
    """Tokenizer of texts in which only control tokens that the server wrote are control tokens.

    A control token is an added token of the checkpoint's tokenizer, special or not. Plain words,
    characters and blanks that only extend the vocabulary are not control tokens. Where the server
    wrote a control token, ``spelled`` replaces its text by a secret name. ``encode`` knows control
    tokens by these names only. So the text around them is tokenized as usual, and a control token
    that content spells is text.
    """

    def __init__(self, backend: Tokenizer, vocab_size: int) -> None:
        """Create the tokenizer; ``vocab_size`` is one more than the highest id of ``backend``."""
        added = backend.get_added_tokens_decoder()
        control = {token_id: token for token_id, token in added.items() if not _is_text(token)}
        secret = secrets.token_hex(8)
        names = {token_id: f"\ue0c2{secret}{token_id:08x}\ue0c3" for token_id in control}
        self._names = names
        self._single_words = {i for i, token in control.items() if token.single_word}
        self._backend = _without_added_tokens(backend, control, names)
        # All ids of ``backend`` are taken, so the tokens added now get new ids.
        num_missing = vocab_size - self._backend.get_vocab_size(with_added_tokens=False)
        self._backend.add_tokens([f"{secret}{number:08x}" for number in range(num_missing)])
        self._first_id = vocab_size
        self._backend.add_tokens([token for token in added.values() if _is_text(token)])
        self._backend.add_tokens(
            [
                AddedToken(names[i], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
                for i, token in control.items()
            ]
        )
        ids = {names[i] if i in control else added[i].content: i for i in added}
        own = {text: self._backend.token_to_id(text) for text in ids}
        self._true_ids = {own[text]: i for text, i in ids.items()}
        self._finder, self._found_ids = _finder({i: token.content for i, token in control.items()})
        self._found = lru_cache(_MAX_KNOWN_RUNS)(self._find)

    def spelled(self, text: str) -> str:
        """Return ``text`` with names instead of the control tokens in its server-written spans.
        Other text is returned unchanged.
        """
        if not isinstance(text, TemplateText):
            return text
        pieces: list[str] = []
        at = 0
        for first, last in text.spans:
            for found in self._found(str.__getitem__(text, slice(first, last))):
                start, end = first + found.start, first + found.end
                if found.token_id in self._single_words and _is_within_word(text, start, end):
                    continue
                pieces += (str.__getitem__(text, slice(at, start)), self._names[found.token_id])
                at = end
        pieces.append(str.__getitem__(text, slice(at, None)))
        return "".join(pieces)

    def encode(self, spelled: str) -> list[int]:
        """Return the token ids of a text from ``spelled``, or of a piece of one. Raises what
        ``ids_of`` does.
        """
        ids = ids_of(self._backend, spelled, add_special_tokens=False)
        true_ids, first = self._true_ids, self._first_id
        return [token_id if token_id < first else true_ids[token_id] for token_id in ids]

    def _find(self, run: str) -> list[_Found]:
        encoding = self._finder.encode(run, add_special_tokens=False)
        return [
            _Found(start, end, self._found_ids[found])
            for found, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if found in self._found_ids
        ]


def _is_text(token: AddedToken) -> bool:
    """Return whether an added token is a word, a character or blanks, which no template could use
    to structure a prompt.
    """
    content = token.content.replace(_SPACE_MARK, " ")
    return not token.special and (
        len(content) == 1 or all(unicodedata.category(one)[0] not in "PS" for one in content)
    )


def _is_within_word(text: str, start: int, end: int) -> bool:
    around = (slice(max(start - 1, 0), start), slice(end, end + 1))
    return any(_WORD.match(str.__getitem__(text, one)) for one in around)


def _finder(texts: dict[int, str]) -> tuple[Tokenizer, dict[int, int]]:
    """Return a tokenizer that finds only ``texts`` (by id), and the map from its ids to these
    ids.
    """
    finder = Tokenizer(models.WordLevel({_OTHER_TEXT: 0}, unk_token=_OTHER_TEXT))
    finder.add_tokens([AddedToken(text, normalized=False) for text in texts.values()])
    ids = finder.get_vocab()
    return finder, {ids[text]: token_id for token_id, text in texts.items()}


def _without_added_tokens(
    backend: Tokenizer, control: dict[int, AddedToken], names: dict[int, str]
) -> Tokenizer:
    """Return the tokenizer with only its vocabulary.

    The vocabulary is shared with ``backend``, unless the model itself makes control tokens of a
    text.
    """
    model, splitter = backend.model, backend.pre_tokenizer
    made = {
        token.content: names[i]
        for i, token in control.items()
        if model.token_to_id(token.content) == i
        and (splitter is None or len(splitter.pre_tokenize_str(token.content)) == 1)
        and [one.id for one in model.tokenize(token.content)] == [i]
    }
    bare = Tokenizer(model)
    if made:
        spec: dict[str, Any] = json.loads(backend.to_str())
        spec |= {"added_tokens": [], "post_processor": None, "model": _renamed(spec["model"], made)}
        return Tokenizer.from_str(json.dumps(spec))
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(backend, part) is not None:
            setattr(bare, part, getattr(backend, part))
    return bare


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the model with ``names`` for some tokens of the vocabulary, so that no text becomes
    them.
    """
    model = copy.copy(model)
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [
            pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return model
