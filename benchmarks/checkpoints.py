"""Checkpoints with random weights in Hugging Face layout, the same for every measured system.

    python -m benchmarks.checkpoints FOLDER

writes the 100M Llama that ``benchmarks.peers`` runs, so that a server started by hand can run it
too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.support.command import command_parser

_SPECIAL_TOKENS = ("<|begin|>", "<|end|>")
_PRINTABLE = range(0x21, 0x7F)
# The tokens before this one are special or single bytes; all others are two printable characters.
FIRST_TEXT_TOKEN = len(_SPECIAL_TOKENS) + 256
_STD = 0.02


class LlamaShape(NamedTuple):
    """Shape of a Llama; the defaults are the 100M model of the comparisons."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    intermediate_size: int = 2048
    vocab_size: int = 8192
    context_window_tokens: int = 16_384
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


LLAMA_100M = LlamaShape()
LLAMA_8B = LlamaShape(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14_336,
    vocab_size=128_256,
)


def write_llama(path: Path, shape: LlamaShape = LLAMA_100M, seed: int = 0) -> Path:
    """Write a bfloat16 Llama with its tokenizer to the folder ``path``; a seed determines it.

    Every token that greedy decoding can generate is two printable characters: rows of the head for
    special tokens and single bytes are zero. So each system has text to send for each token, and no
    answer ends early.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    _write_tokenizer(path, shape.vocab_size)
    save_file(_weights(shape, seed), path / "model.safetensors", metadata={"format": "pt"})
    return path


def config_of(shape: LlamaShape) -> dict[str, Any]:
    """Return the config.json of a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_window_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": shape.tied,
        "dtype": "bfloat16",
    }


def _weights(shape: LlamaShape, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab_size = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * _STD).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    head = normal(vocab_size, hidden)
    head[:FIRST_TEXT_TOKEN] = 0
    tensors = {"model.norm.weight": ones()}
    if shape.tied:
        tensors["model.embed_tokens.weight"] = head
    else:
        tensors["lm_head.weight"] = head
        tensors["model.embed_tokens.weight"] = normal(vocab_size, hidden)
    for index in range(shape.num_layers):
        prefix = f"model.layers.{index}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones(),
            f"{prefix}.self_attn.q_proj.weight": normal(queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": ones(),
            f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, inner),
        }
    return tensors


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a byte-level BPE whose merges are pairs of printable characters, as many as fit."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*_SPECIAL_TOKENS, *symbols]
    characters = [chr(code) for code in _PRINTABLE]
    merges = [(first, second) for first in characters for second in characters]
    num_merges = vocab_size - len(names)
    if not 0 < num_merges <= len(merges):
        raise ValueError(
            f"vocab_size must be from {len(names) + 1} to {len(names) + len(merges)}, got "
            f"{vocab_size}"
        )
    merges = merges[:num_merges]
    names += [first + second for first, second in merges]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL_TOKENS[0],
        "eos_token": _SPECIAL_TOKENS[1],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = command_parser("checkpoints", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write_llama(arguments.folder, seed=arguments.seed))


if __name__ == "__main__":
    main()
