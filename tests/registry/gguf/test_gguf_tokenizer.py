"""Tokenizers read from GGUF files, compared with the tokenizers that the files were made of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import processors as post_processors
from transformers.tokenization_utils_base import generate_merges

from millrace.registry.catalogue import load_catalogue
from millrace.registry.gguf.checkpoint_folder import checkpoint_folder
from millrace.registry.gguf.splitters import SPLITTERS
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.text_rules import LLAMA_3, QWEN_2
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import CheckpointError
from millrace.schemas.jobs import ChatMessage
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.engine.gguf_made import TOKENS, write_metadata
from tests.support.engine.tokenizers_made import TEXTS, byte_fallback, byte_level, write_tokenizer
from tests.support.gguf_files import write_gguf

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TRICKY = (
    "",
    " ",
    "   three before, two behind  ",
    "\n\n\n  tabs\t\tand\r\nlines \n",
    "1 22 333 4444 55555 1234567890 \uff13\uff14\uff15 ½",
    "I'm sure they'LL say we've DON'T he'd you're",
    "CamelCaseWords and snake_case_words, kebab-case!",
    "naïve café ﬁ Ünïcödé e\u0301 \u1e69 é",
    "你好世界\uff0cこんにちは。안녕하세요 Привет Ελληνικά مرحبا हिन्दी",
    "👍🏽 👩‍👩‍👧 \U0001f9ff\ufe0f \u200b\u200d zero width",
    "a\x00b\x01\x7f\u0085\u2028\u00a0end",
    "<|user|>hi<|end|> <|end|>\n<tool> a b 工具工具 <|begin|>",
    "</s> <s>x</s>y <unk> <0x0A>",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # done\n\n",
    *TEXTS[:4],
)
_ANY_TEXT = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t'sS1aA,.▁é<|>end你")), max_size=60
)


def splitting(
    pattern: str, normalizer: Any = None, *, then_as_gpt_2: bool = False, **model: Any
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer that splits texts by ``pattern``."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**model))
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=then_as_gpt_2)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, own])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, *_TRICKY], trainer)
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("工具"), AddedToken("a b")])
    tokenizer.post_processor = post_processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


def sentencepiece(*, prefix: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer as transformers makes it from a sentencepiece model with scores that fall
    with the ids."""
    made = byte_fallback()
    vocabulary = made.get_vocab()
    scores = {
        token: -float(token_id)
        for token, token_id in vocabulary.items()
        if token_id > vocabulary["<0xFF>"]
    }
    made.model = models.BPE(
        vocab=vocabulary,
        merges=generate_merges(vocabulary, scores),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = normalizers.Replace(" ", "▁")
    before = normalizers.Prepend("▁")
    made.normalizer = normalizers.Sequence([before, spaces]) if prefix else spaces
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    if not prefix:
        back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence(back)
    return made


MADE: dict[str, tuple[Callable[[], tokenizers.Tokenizer], str | None]] = {
    "gpt-2": (byte_level, None),
    "llama-3": (lambda: splitting(LLAMA_3, ignore_merges=True), "llama-bpe"),
    "qwen-2": (lambda: splitting(QWEN_2, normalizers.NFC()), "qwen2"),
    "lone digits": (lambda: splitting(r"\p{N}", then_as_gpt_2=True), "refact"),
    "sentencepiece": (lambda: sentencepiece(prefix=True), None),
    "gemma": (lambda: sentencepiece(prefix=False), None),
}


@pytest.fixture(scope="module", params=MADE)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return (the tokenizer of a checkpoint folder, the same of the GGUF file made of it)."""
    make, pre_tokenizer = MADE[request.param]
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = make()
    has_roles = tokenizer.token_to_id("<|user|>") is not None
    bos, eos = ("<|begin|>", "<|end|>") if has_roles else ("<s>", "</s>")
    write_checkpoint(folder / "hf", vocab_size=tokenizer.get_vocab_size())
    write_tokenizer(folder / "hf", tokenizer, bos_token=bos, eos=eos, chat_template=_TEMPLATE)
    file = write_gguf(folder / "x.gguf", folder / "hf", "float32", pre_tokenizer=pre_tokenizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return Tokenizer.load(folder / "hf"), Tokenizer.load(checkpoint_folder(file))


@pytest.mark.parametrize("special", [True, False])
def test_encoding_and_decoding_are_the_same(
    pair: tuple[Tokenizer, Tokenizer], special: bool
) -> None:
    hf, ours = pair
    assert ours.vocab_size == hf.vocab_size
    assert ours.special_token_ids == hf.special_token_ids
    for text in _TRICKY:
        ids = hf.encode(text, special)
        assert ours.encode(text, special) == ids, text
        for skipped in (True, False):
            assert ours.decode(ids, skipped) == hf.decode(ids, skipped)
    assert [ours.token_bytes(i) for i in range(hf.vocab_size)] == [
        hf.token_bytes(i) for i in range(hf.vocab_size)
    ]
    order = random.Random(3)
    for _ in range(200):
        ids = order.choices(range(hf.vocab_size), k=12)
        assert ours.decode(ids, special) == hf.decode(ids, special)


def test_conversations_are_the_same(pair: tuple[Tokenizer, Tokenizer]) -> None:
    hf, ours = pair
    for text in _TRICKY:
        messages = [ChatMessage("system", "Be brief."), ChatMessage("user", text)]
        assert ours.render_chat(messages) == hf.render_chat(messages)
        assert ours.encode_chat(messages) == hf.encode_chat(messages)


@settings(deadline=None, max_examples=150)
@given(text=_ANY_TEXT)
def test_any_text_has_the_same_tokens(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    hf, ours = pair
    assert ours.encode(text) == hf.encode(text)


def test_long_texts_may_be_cut_as_before(pair: tuple[Tokenizer, Tokenizer]) -> None:
    hf, ours = pair
    assert ours.rules == hf.rules


def file_of(tmp_path: Path, **changes: Any) -> Path:
    """Call ``write_metadata`` with keys below ``tokenizer.ggml``."""
    return write_metadata(
        tmp_path / "x.gguf", {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    )


def spec_of(file: Path) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads((checkpoint_folder(file) / "tokenizer.json").read_text())
    return spec


@pytest.mark.parametrize("name", SPLITTERS)
def test_every_named_splitter_is_a_pattern_that_keeps_the_text(tmp_path: Path, name: str) -> None:
    spec_of(file_of(tmp_path, pre=name))
    steps = SPLITTERS[name].steps()
    split = tokenizers.Tokenizer.from_str(
        json.dumps(
            spec_of(file_of(tmp_path, pre=name))
            | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
        )
    ).pre_tokenizer
    for text in _TRICKY:
        words = [word for word, _ in split.pre_tokenize_str(text)]
        assert "".join(words) == text
        assert "" not in words


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 1234 x", ["it", "'s", " 1234", " x"]),
        ("llama-bpe", "IT'S 1234 x", ["IT", "'S", " ", "123", "4", " x"]),
        ("qwen2", "it's 123 x", ["it", "'s", " ", "1", "2", "3", " x"]),
        ("smollm", "a 12 b", ["a", " ", "1", "2", " b"]),
        ("tekken", "helloWorld's 12", ["hello", "World", "'s", " ", "1", "2"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
        ("falcon", "a 12345!?", ["a", " ", "123", "45", "!?"]),
        ("deepseek-v3", "a 1234你好!x", ["a", " ", "123", "4", "你好", "!x"]),
        ("deepseek-llm", "mill 12你好!", ["mill", " ", "12", "你好", "!"]),
        ("deepseek-coder", "a 12\n\nb", ["a", " ", "1", "2", "\n", "\n", "b"]),
        ("qwen35", "ने 12", ["ने", " ", "1", "2"]),
        ("bloom", "a, b (c", ["a", ",", " b", " (", "c"]),
    ],
)
def test_words_of_well_known_tokenizers(name: str, text: str, words: list[str]) -> None:
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITTERS[name].patterns]
    )
    assert [word for word, _ in split.pre_tokenize_str(text)] == words


def test_whether_a_prompt_has_tokens_around_it(tmp_path: Path) -> None:
    def around(**changes: Any) -> list[int]:
        folder = checkpoint_folder(file_of(tmp_path, **changes))
        return Tokenizer.load(folder).encode("!")

    assert around() == [2]
    assert around(pre="llama-bpe") == [0, 2]
    assert around(pre="llama-bpe", add_bos_token=False) == [2]
    assert around(add_bos_token=True, add_eos_token=True) == [0, 2, 1]
    assert around(add_bos_token=True, bos_token_id=None) == [2]


def test_what_ends_an_answer(tmp_path: Path) -> None:
    def endings(tokens: list[str], **changes: Any) -> set[str]:
        types = [1] * (len(TOKENS) + len(tokens))
        file = file_of(tmp_path, tokens=[*TOKENS, *tokens], token_type=types, **changes)
        served = ServedModel.load(load_catalogue("").with_model(str(file)), "x")
        special = served.tokenizer.special_token_ids
        assert served.eos_token_ids == served.config.eos_token_ids
        spelled = {[*TOKENS, *tokens][i] for i in served.eos_token_ids}
        assert {[*TOKENS, *tokens][i] for i in special} == spelled - {"</s>"}
        return spelled

    assert endings([]) == {"</s>"}
    assert endings(["<|eot_id|>", "<|im_end|>", "x!"]) == {"</s>", "<|eot_id|>", "<|im_end|>"}
    assert endings(["over"], eot_token_id=len(TOKENS)) == {"</s>", "over"}
    assert endings(["<|end|>"]) == {"</s>", "<|end|>"}
    assert endings(["<|end|>", "<|call|>", "<|return|>"]) == {"</s>", "<|call|>", "<|return|>"}
    assert endings(["<|tool_response>"], eos_token_id=None) == {"<|tool_response>"}


def test_defaults_of_old_sentencepiece_files(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a"]
    file = file_of(
        tmp_path,
        model="llama",
        pre=None,
        tokens=tokens,
        scores=[0.0, 0.0, 0.0, -3.0, -2.0, -1.0],
        merges=None,
        token_type=[2, 3, 3, 1, 1, 1],
        bos_token_id=None,
        eos_token_id=None,
    )
    tokenizer = Tokenizer.load(checkpoint_folder(file))
    assert tokenizer.encode("a a") == [1, 5, 5]
    assert tokenizer.decode([1, 5, 5]) == "a a"
    assert tokenizer.encode("a?") == [1, 5, 0]
    assert tokenizer.eos_token_ids == (2,)


def test_spaces_behind_phi_3_s_special_tokens_are_theirs(tmp_path: Path) -> None:
    tokens = [*TOKENS, "<|user|>", "Ċ"]
    changes = {
        "general.name": "Phi-3 Mini",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2) + [3, 1],
    }
    tokenizer = Tokenizer.load(checkpoint_folder(write_metadata(tmp_path / "x.gguf", changes)))
    user, line = len(TOKENS), len(TOKENS) + 1
    assert tokenizer.encode("<|user|>\n!") == [user, 2]
    assert tokenizer.encode("<s>\n!") == [0, line, 2]


def test_a_template_for_tools_beside_the_other(tmp_path: Path) -> None:
    changes = {
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ tools | tojson }}<tool_call>",
    }
    folder = checkpoint_folder(write_metadata(tmp_path / "x.gguf", changes))
    settings_ = json.loads((folder / "tokenizer_config.json").read_text())
    assert [one["name"] for one in settings_["chat_template"]] == ["default", "tool_use"]
    assert Tokenizer.load(folder).render_chat([ChatMessage("user", "mill")]) == "mill"


_TYPES = [3, 3] + [1] * (len(TOKENS) - 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model must be one of gpt2, llama, gemma4, got 'bert'"),
        ({"model": "rwkv"}, "got 'rwkv'"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre must be one of .*, got 'kimi-k2'"),
        ({"pre": 3}, "tokenizer.ggml.pre must be a string"),
        ({"tokens": None, "token_type": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2], "token_type": None}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"token_type": _TYPES[1:]}, "token_type must have one element per token, 97; it has 96"),
        ({"token_type": ["x"] * len(TOKENS)}, "token_type must be a list of numbers"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a c"]}, "tokenizer.ggml.merges has a merge of unknown tokens: 'a c'"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has a merge of unknown tokens: 'ab'"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"eos_token_id": 97}, "eos_token_id must be one token id below 97, got 97"),
        ({"bos_token_id": "x"}, "bos_token_id must be a token id"),
        ({"add_bos_token": 1}, "add_bos_token must be true or false"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    file = file_of(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoint_folder(file)
    assert str(file) in caught.value.message


def test_a_template_that_is_none(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "x.gguf", {"tokenizer.chat_template": "{% for %}"})
    with pytest.raises(CheckpointError, match=r"x\.gguf: key tokenizer\.chat_template, line 1"):
        checkpoint_folder(file)
