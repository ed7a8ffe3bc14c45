"""100M Llama with a known successor of each token, at the speed of random weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints import (
    FIRST_TEXT_TOKEN,
    LLAMA_100M,
    LlamaShape,
    config_of,
    write_llama,
)

# Scale of queries and keys at which a token attends only to itself or an equal token.
_FOCUS = 5.0
# Logit of the successor; other logits are about 0.
_SURE = 16.0


def write_copier_head(
    path: Path, target: Path, shape: LlamaShape = LLAMA_100M, seed: int = 0, agreement: float = 1.0
) -> Path:
    """Write a head for ``write_copier``'s checkpoint ``target``, with a share of its successors.

    It does not need the features: its attention carries the token from the embedding to the head,
    and removes the features.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_config(shape), indent=2) + "\n")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    tensors = _tensors(shape, embedding, known_successors(shape, seed, agreement), seed)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _config(shape: LlamaShape) -> dict[str, Any]:
    return config_of(shape._replace(num_layers=1, context_window_tokens=2048)) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.vocab_size - FIRST_TEXT_TOKEN,
    }


def _tensors(
    shape: LlamaShape, embedding: torch.Tensor, known: dict[int, int], seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    values = shape.num_kv_heads * shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    keys = torch.randn(values, hidden, generator=generator) * (_FOCUS / hidden**0.5)
    carried = torch.randn(values, hidden, generator=generator) / hidden**0.5
    spread = torch.linalg.qr(torch.randn(hidden, values, generator=generator)).Q
    by_head = spread.view(hidden, shape.num_kv_heads, 1, shape.head_dim) / group
    nothing = torch.zeros(values, hidden)
    # The features of a token are those to which the token before it was carried.
    taken = -((values / hidden) ** 0.5) * spread.T
    num_known = shape.vocab_size - FIRST_TEXT_TOKEN
    normed = F.rms_norm(embedding, (hidden,), eps=1e-5)
    rows = normed @ carried.T @ spread.T * (_SURE / (values * hidden) ** 0.5)
    head = torch.zeros(num_known, hidden)
    for token, following in known.items():
        head[following - FIRST_TEXT_TOKEN] = rows[token]
    ones = torch.ones(hidden)
    wide = {
        "fc.weight": torch.zeros(hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": ones,
        "midlayer.input_layernorm.weight": ones.clone(),
        "midlayer.self_attn.q_proj.weight": torch.cat(
            (_by_group(keys, shape, group), nothing.repeat(group, 1)), 1
        ),
        "midlayer.self_attn.k_proj.weight": torch.cat((keys, nothing), 1),
        "midlayer.self_attn.v_proj.weight": torch.cat((carried, taken), 1),
        "midlayer.self_attn.o_proj.weight": by_head.expand(-1, -1, group, -1).flatten(1),
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "midlayer.mlp.gate_proj.weight": torch.randn(inner, hidden, generator=generator) * 0.02,
        "midlayer.mlp.up_proj.weight": torch.randn(inner, hidden, generator=generator) * 0.02,
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, inner),
        "norm.weight": ones.clone(),
        "lm_head.weight": head,
    }
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in wide.items()}
    tensors["d2t"] = torch.full((num_known,), FIRST_TEXT_TOKEN)
    tensors["t2d"] = torch.arange(shape.vocab_size) >= FIRST_TEXT_TOKEN
    return tensors


def _by_group(keys: torch.Tensor, shape: LlamaShape, group: int) -> torch.Tensor:
    """Return the queries of each head, which are the keys that it meets."""
    heads = keys.view(shape.num_kv_heads, 1, shape.head_dim, -1)
    return heads.expand(-1, group, -1, -1).flatten(0, 2)


# Much larger than the layers' contributions, so that a successor depends on its token alone.
_EMBEDDING_SCALE = 200.0
# Whole tokens are likelier than their characters, as in a trained model.
_PREFERENCE = 0.02


def write_copier(
    path: Path, shape: LlamaShape = LLAMA_100M, seed: int = 0, agreement: float = 1.0
) -> Path:
    """Write ``write_llama``'s checkpoint with a head that knows one successor of each text token.

    With an ``agreement`` below 1 it knows only that share of them.
    """
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
    """Return the successor of each text token: one ring of all of them."""
    tokens = list(range(FIRST_TEXT_TOKEN, shape.vocab_size))
    random.Random(seed).shuffle(tokens)
    return dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True))


def known_successors(shape: LlamaShape, seed: int, agreement: float) -> dict[int, int]:
    """Return the successors of which only the share ``agreement`` is right."""
    generator = random.Random(seed)
    known = successors(shape, seed)
    unsaid = [token for token in known if generator.random() >= agreement]
    for token in unsaid:
        known[token] = known[generator.choice(unsaid)]
    return known


def text_from(token: int, length: int, shape: LlamaShape = LLAMA_100M, seed: int = 0) -> list[int]:
    """Return the model's text after ``token``."""
    following = successors(shape, seed)
    said: list[int] = []
    for _ in range(length):
        token = following[token]
        said.append(token)
    return said
