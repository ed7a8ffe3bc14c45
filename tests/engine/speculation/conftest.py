"""A small random Llama whose rows are exact, with a tokenizer and a token that is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.checkpoints import save_llama
from tests.engine.speculation.worlds import NAN_TOKEN, VOCAB_SIZE
from tests.support.engine.tokenizers_made import byte_level, write_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact")
    save_llama(
        path,
        nan_token=NAN_TOKEN,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    return write_tokenizer(path, byte_level())
