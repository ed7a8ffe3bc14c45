"""Tokenizer of a GGUF file, in the form of a checkpoint's ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import tokenizers
from gguf.constants import Keys, TokenType

from millrace.registry.chat_template import ChatTemplate
from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.gguf.splitters import SPLITTERS
from millrace.registry.gguf.vocabulary import Vocabulary, array, read_vocabulary
from millrace.schemas.errors import CheckpointError

_BYTE_LEVEL, _SENTENCEPIECE, _SENTENCEPIECE_MERGES = "gpt2", "llama", "gemma4"
_SUPPORTED = (_BYTE_LEVEL, _SENTENCEPIECE, _SENTENCEPIECE_MERGES)
_SPACE = "\u2581"
_ADDED = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
# The only special tokens of the model that keep the space after them.
_PHI_3 = ("phi-3", "phi3")
_PHI_3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
_TOOL_TEMPLATE = "tool_use"


class GgufTokenizer(NamedTuple):
    """Tokenizer read from a GGUF file; ``tokenizer`` and ``settings`` are the contents of
    tokenizer.json and tokenizer_config.json.
    """

    vocabulary: Vocabulary
    tokenizer: dict[str, Any]
    settings: dict[str, Any]


def read_tokenizer(fields: JsonFields) -> GgufTokenizer:
    """Build the tokenizer from a file's metadata.

    Raises:
        CheckpointError: the kind of tokenizer or splitter is unknown, or the metadata contradict
            themselves; names the file and the key.
    """
    key = Keys.Tokenizer.MODEL
    kind = fields.string(key, "")
    if kind not in _SUPPORTED:
        raise fields.bad(key, f"one of {', '.join(_SUPPORTED)}")
    vocabulary = read_vocabulary(fields, sentencepiece=kind == _SENTENCEPIECE)
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    if kind == _BYTE_LEVEL:
        parts, adds_bos = _byte_level(fields, ids)
    elif kind == _SENTENCEPIECE:
        parts, adds_bos = _by_scores(fields, vocabulary, ids), True
    else:
        parts, adds_bos = _sentencepiece(ids, _merges(fields, ids), prefix=False), True
    spec = parts | {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(fields, vocabulary),
        "post_processor": _around(fields, vocabulary, adds_bos=adds_bos),
    }
    if vocabulary.unknown is not None:
        spec["model"]["unk_token"] = vocabulary.tokens[vocabulary.unknown]
    try:
        tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:
        raise CheckpointError(f"{fields.path}: its tokenizer cannot be used: {error}.") from error
    return GgufTokenizer(vocabulary, spec, _settings(fields, vocabulary))


def _byte_level(fields: JsonFields, ids: dict[str, int]) -> tuple[dict[str, Any], bool]:
    """Return (parts of tokenizer.json, whether a prompt has a token before it)."""
    key = Keys.Tokenizer.PRE
    splitter = SPLITTERS.get(fields.string(key, "default"))
    if splitter is None:
        raise fields.bad(key, f"one of {', '.join(SPLITTERS)}")
    model = _bpe(ids, _merges(fields, ids))
    last = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    parts = {
        "model": model | {"ignore_merges": splitter.whole_words},
        "normalizer": {"type": "NFC"} if splitter.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splitter.steps(), last]},
        "decoder": last,
    }
    return parts, splitter.adds_bos


def _by_scores(fields: JsonFields, vocabulary: Vocabulary, ids: dict[str, int]) -> dict[str, Any]:
    key = Keys.Tokenizer.SCORES
    scores = array(fields, key, (int, float), len(ids))
    if scores is None:
        raise fields.bad(key, "a list of numbers")
    merges = _merges_by_score(vocabulary, ids, scores)
    prefix = fields.boolean(Keys.Tokenizer.ADD_PREFIX, default=True)
    return _sentencepiece(ids, merges, prefix=prefix)


def _sentencepiece(
    ids: dict[str, int], merges: list[tuple[str, str]], *, prefix: bool
) -> dict[str, Any]:
    """Return parts of tokenizer.json for sentencepiece.

    Texts are not split into words. Text without a token is spelled in byte tokens. With ``prefix``
    a text begins with a space that decoding removes.
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = {"type": "Prepend", "prepend": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "model": _bpe(ids, merges) | {"byte_fallback": True, "fuse_unk": True},
        "normalizer": {"type": "Sequence", "normalizers": [before, spaces]} if prefix else spaces,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, strip] if prefix else decoders},
    }


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
    }


def _merges(fields: JsonFields, ids: dict[str, int]) -> list[tuple[str, str]]:
    key = Keys.Tokenizer.MERGES
    spelled = array(fields, key, str)
    if spelled is None:
        raise fields.bad(key, "a list of pairs of tokens")
    merges = []
    for merge in spelled:
        # A token may be a space, or begin with one.
        at = merge.find(" ", 1)
        first, second = merge[:at], merge[at + 1 :]
        if at < 0 or not {first, second, first + second} <= ids.keys():
            raise CheckpointError(
                f"{fields.path}: key {key} has a merge of unknown tokens: {merge!r:.80}."
            )
        merges.append((first, second))
    return merges


def _merges_by_score(
    vocabulary: Vocabulary, ids: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Return every way to make a token of two others, best score first.

    Sentencepiece joins the neighbours whose token has the best score, as BPE joins the pair whose
    merge comes first. Ties are in the order of transformers: the longer first token comes first.
    """
    ranked = []
    for token_id, token in enumerate(vocabulary.tokens):
        if vocabulary.types[token_id] != TokenType.NORMAL:
            continue
        for at in range(1, len(token)):
            first, second = token[:at], token[at:]
            if first in ids and second in ids:
                ranked.append((-scores[token_id], -at, at - len(token), token_id, first, second))
    return [(first, second) for *_, first, second in sorted(ranked)]


def _added_tokens(fields: JsonFields, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the tokens that are matched in a text verbatim, before any other step."""
    is_phi_3 = any(name in fields.string(Keys.General.NAME, "").lower() for name in _PHI_3)
    return [
        {
            "id": token_id,
            "content": vocabulary.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": is_phi_3 and vocabulary.tokens[token_id] not in _PHI_3_KEEPS_SPACE,
            "normalized": False,
            "special": kind != TokenType.USER_DEFINED,
        }
        for token_id, kind in enumerate(vocabulary.types)
        if kind in _ADDED
    ]


def _around(fields: JsonFields, vocabulary: Vocabulary, *, adds_bos: bool) -> dict[str, Any] | None:
    """Return the tokens before and after a prompt."""
    adds_bos = fields.boolean(Keys.Tokenizer.ADD_BOS, default=adds_bos)
    adds_eos = fields.boolean(Keys.Tokenizer.ADD_EOS, default=False)
    before = [] if vocabulary.bos is None or not adds_bos else [vocabulary.bos]
    behind = [] if vocabulary.eos is None or not adds_eos else [vocabulary.eos]
    if not before and not behind:
        return None
    special = {vocabulary.tokens[token_id]: token_id for token_id in before + behind}
    return {
        "type": "TemplateProcessing",
        "single": [*_pieces(vocabulary, before), _TEXT, *_pieces(vocabulary, behind)],
        "pair": [_TEXT, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]}
            for token, token_id in special.items()
        },
    }


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def _pieces(vocabulary: Vocabulary, token_ids: Iterable[int]) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": vocabulary.tokens[i], "type_id": 0}} for i in token_ids]


def _settings(fields: JsonFields, vocabulary: Vocabulary) -> dict[str, Any]:
    token_ids = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "unk_token": vocabulary.unknown,
        "pad_token": vocabulary.padding,
    }
    settings: dict[str, Any] = {
        name: vocabulary.tokens[token_id]
        for name, token_id in token_ids.items()
        if token_id is not None
    }
    templates = {
        name: source
        for name, key in (
            ("default", Keys.Tokenizer.CHAT_TEMPLATE),
            (_TOOL_TEMPLATE, Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=_TOOL_TEMPLATE)),
        )
        if (source := fields.string(key, ""))
        and ChatTemplate(source, {}, f"{fields.path}: key {key}")
    }
    if "default" in templates:
        settings["chat_template"] = [
            {"name": name, "template": source} for name, source in templates.items()
        ]
    return settings
