"""Tokenizer of the demo model: byte-level BPE, the marks of a conversation, the chat template."""

from collections.abc import Iterable
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS: Final = "<|bos|>"
PAD: Final = "<|pad|>"
END: Final = "<|end|>"
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SPECIAL_TOKENS: Final = [BOS, PAD, END, SYSTEM, USER, ASSISTANT]

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{% if role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('This model knows the roles system, user and assistant, not ' + role) }}"
    "{% endif %}"
    "{{ '<|' + role + '|>' + (message['content'] | trim) + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens; it can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def known_token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of one of the demo model's marks. Raises KeyError if the tokenizer lacks it."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise KeyError(token)
    return int(token_id)


def tokenizer_config(context_tokens: int) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
