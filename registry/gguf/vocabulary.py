"""Vocabulary of a GGUF file: the tokens' spellings and kinds, and the special tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from gguf.constants import Keys, TokenType

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.schemas.errors import CheckpointError

# Tokens that end an answer in any model, by spelling. llama.cpp uses them besides the ids that a
# file names, since not all files name all of theirs.
_ENDINGS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>", "<eos>"),
        *("<|tool_response>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    }
)
# Matched as one token only if the file says so: in code and HTML it is ordinary text.
_ORDINARY_ENDING = "</s>"
# If a vocabulary has all tokens of the set, the token after it ends only a part of the answer.
_NO_ENDING_BESIDE = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|flush|>", "<|call|>"}, "<|end|>"),
    ({"<|flush|>", "<|calls|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)
_ENDING_KEYS = (
    Keys.Tokenizer.EOS_ID,
    Keys.Tokenizer.EOT_ID,
    Keys.Tokenizer.EOM_ID,
    Keys.Tokenizer.FIM_PAD_ID,
    Keys.Tokenizer.FIM_REP_ID,
    Keys.Tokenizer.FIM_SEP_ID,
)


class Vocabulary(NamedTuple):
    """Vocabulary; ``tokens`` and ``types`` are by id.

    ``endings`` are the tokens that end an answer, ``eos`` the first of them. ``unknown`` stands for
    text that no token covers.
    """

    tokens: list[str]
    types: list[int]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    endings: tuple[int, ...]


def read_vocabulary(fields: JsonFields, *, sentencepiece: bool) -> Vocabulary:
    """Read the vocabulary from the ``fields`` of a file; in files for ``sentencepiece`` special ids
    have defaults.

    Raises:
        CheckpointError: names the file and the key.
    """
    tokens = _tokens(fields)
    types = array(fields, Keys.Tokenizer.TOKEN_TYPE, int, len(tokens))
    types = [int(TokenType.NORMAL)] * len(tokens) if types is None else list(types)
    defaults = (1, 2, 0) if sentencepiece else (None, None, None)
    keys = (Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID, Keys.Tokenizer.UNK_ID)
    bos, eos, unknown = (
        _token_id(fields, key, len(tokens), default)
        for key, default in zip(keys, defaults, strict=True)
    )
    endings = _endings(fields, tokens, eos)
    for token_id in endings:
        if tokens[token_id] != _ORDINARY_ENDING:
            types[token_id] = int(TokenType.CONTROL)
    padding = _token_id(fields, Keys.Tokenizer.PAD_ID, len(tokens))
    return Vocabulary(tokens, types, bos, eos, unknown, padding, endings)


def array(
    fields: JsonFields, key: str, kind: type | tuple[type, ...], length: int | None = None
) -> list[Any] | None:
    """Return the list under a key; None if absent.

    Raises:
        CheckpointError: the elements are not of ``kind``, or not ``length`` of them.
    """
    values = fields.get(key)
    if values is None:
        return None
    # All elements of an array in a file have one type.
    if not isinstance(values, list) or (values and not isinstance(values[0], kind)):
        raise CheckpointError(f"{fields.path}: key {key} must be a list of {_name(kind)}.")
    if length is not None and len(values) != length:
        raise CheckpointError(
            f"{fields.path}: key {key} must have one element per token, {length}; it has "
            f"{len(values)}."
        )
    return values


def _name(kind: type | tuple[type, ...]) -> str:
    return "texts" if kind is str else "numbers"


def _tokens(fields: JsonFields) -> list[str]:
    key = Keys.Tokenizer.LIST
    spelled = array(fields, key, str)
    if not spelled:
        raise CheckpointError(f"{fields.path}: key {key} is missing: the file has no tokenizer.")
    # llama.cpp's spelling of tokens without one.
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(spelled)]
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise CheckpointError(f"{fields.path}: key {key} has {twice!r:.80} twice.")
    return tokens


def _token_id(
    fields: JsonFields, key: str, num_tokens: int, default: int | None = None
) -> int | None:
    ids = fields.token_ids(key)
    if not ids:
        return default if default is not None and default < num_tokens else None
    if len(ids) != 1 or ids[0] >= num_tokens:
        raise fields.bad(key, f"one token id below {num_tokens}")
    return ids[0]


def _endings(fields: JsonFields, tokens: Sequence[str], eos: int | None) -> tuple[int, ...]:
    named = (_token_id(fields, key, len(tokens)) for key in _ENDING_KEYS)
    spelled = {token: i for i, token in enumerate(tokens) if token in _ENDINGS}
    ids = dict.fromkeys([eos, *named, *spelled.values()])
    for beside, token in _NO_ENDING_BESIDE:
        if spelled.keys() >= beside and token in spelled:
            ids.pop(spelled[token], None)
    return tuple(token_id for token_id in ids if token_id is not None)
