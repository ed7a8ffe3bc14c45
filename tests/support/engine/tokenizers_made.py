"""Small tokenizers trained on the spot, one of each kind that checkpoints come with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import processors as post_processors

TEXTS = (
    "A millrace is the channel that leads a stream onto a mill wheel.",
    "What is TTFT? The time to the first token, in milliseconds.",
    "naïve café, Ünïcödé, 你好世界, こんにちは, emoji 👍🏽 👩‍👩‍👧 and é",
    "def main() -> None:\n    print('hello world')\n",
) * 4
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE as in Llama 3 and Qwen; ids from 0: <|begin|>, <|end|>, roles, bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|begin|>", "<|end|>", *_ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("工具"), AddedToken("a b")])
    tokenizer.post_processor = post_processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """BPE over ▁ words with one token per byte for the rest, as in Llama 2 and Mistral."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = post_processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """The same words with the Metaspace decoder."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def write_tokenizer(
    path: Path, tokenizer: Tokenizer, *, eos: str = "<|end|>", **settings: Any
) -> Path:
    """tokenizer.json and tokenizer_config.json in a checkpoint folder."""
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": tokenizer.id_to_token(0), "eos_token": eos} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
