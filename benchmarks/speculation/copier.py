"""A 100M Llama that says what its prompt says: random weights take the time that any would, and
each token is followed by one of its own."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints import FIRST_TEXT_TOKEN, LLAMA_100M, LlamaShape, write_llama

# So much larger than what the layers add that a token's successor does not depend on the others.
_EMBEDDING_SCALE = 200.0
# Whole tokens are likelier than their characters, as they are in a model that was trained.
_PREFERENCE = 0.02


def write_copier(
    path: Path, shape: LlamaShape = LLAMA_100M, seed: int = 0, agreement: float = 1.0
) -> Path:
    """``write_llama``'s checkpoint, whose head knows one successor of each text token; below an
    ``agreement`` of 1 it knows no more than so many of them."""
    write_llama(path, shape, seed)
    file = path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"].float()
    common = torch.randn(shape.hidden_size, generator=torch.Generator().manual_seed(seed))
    head = torch.zeros_like(embedding)
    for token, following in known_successors(shape, seed, agreement).items():
        head[following] = embedding[token] + _PREFERENCE * common
    tensors["lm_head.weight"] = head.bfloat16()
    embedding = embedding * _EMBEDDING_SCALE + common
    tensors["model.embed_tokens.weight"] = embedding.bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def successors(shape: LlamaShape = LLAMA_100M, seed: int = 0) -> dict[int, int]:
    """What follows each text token: one ring of all of them."""
    tokens = list(range(FIRST_TEXT_TOKEN, shape.vocab_size))
    random.Random(seed).shuffle(tokens)
    return dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True))


def known_successors(shape: LlamaShape, seed: int, agreement: float) -> dict[int, int]:
    """The same as one has it who knows no more than such a share of them."""
    generator = random.Random(seed)
    known = successors(shape, seed)
    unsaid = [token for token in known if generator.random() >= agreement]
    for token in unsaid:
        known[token] = known[generator.choice(unsaid)]
    return known


def text_from(token: int, length: int, shape: LlamaShape = LLAMA_100M, seed: int = 0) -> list[int]:
    """What the model says behind ``token``."""
    following = successors(shape, seed)
    said: list[int] = []
    for _ in range(length):
        token = following[token]
        said.append(token)
    return said
