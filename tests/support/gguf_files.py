"""GGUF files made of checkpoints, so that llama.cpp serves the very weights that others serve."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from millrace.engine.models.rope import inverse_frequencies
from millrace.registry.checkpoints.checkpoint import ModelConfig, open_tensors, read_model_config

# llama.cpp's names of what computes a family, and whether it turns neighbouring numbers of a head
# by RoPE where the checkpoint's layout turns the n-th of one half with the n-th of the other.
_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", True),
    "MistralForCausalLM": ("llama", True),
    "Qwen2ForCausalLM": ("qwen2", False),
    "Qwen3ForCausalLM": ("qwen3", False),
    "Qwen3Model": ("qwen3", False),
    "MixtralForCausalLM": ("llama", True),
    "Qwen3MoeForCausalLM": ("qwen3moe", False),
}
_GPT2_SPLITTER = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_NUM_BYTES = 256
MatrixType = Literal["float32", "float16", "bfloat16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
_EXPERT = re.compile(
    r"(?P<before>.*\.experts\.)(?P<expert>\d+)\.(?P<behind>(w1|w2|w3|gate_proj|up_proj|down_proj).*)"
)
_KINDS: dict[MatrixType, GGMLQuantizationType] = {
    "float32": GGMLQuantizationType.F32,
    "float16": GGMLQuantizationType.F16,
    "bfloat16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
    "q4_1": GGMLQuantizationType.Q4_1,
    "q5_0": GGMLQuantizationType.Q5_0,
    "q5_1": GGMLQuantizationType.Q5_1,
}


def write_gguf(
    path: Path,
    checkpoint: Path,
    dtype: MatrixType = "bfloat16",
    *,
    pre_tokenizer: str | None = None,
    stored: Mapping[str, tuple[npt.NDArray[Any], GGMLQuantizationType]] | None = None,
    tensors_a_file: int = 0,
) -> Path:
    """The GGUF file ``path`` of a checkpoint folder: weights, tokenizer and chat template.

    Matrices are of ``dtype``, the head and the embedding too, vectors float32. ``pre_tokenizer`` is
    llama.cpp's name of how a byte-level tokenizer splits texts into words; None: as GPT-2 does, and
    only if it does. ``stored`` has the blocks of tensors by GGUF's names, in place of the
    checkpoint's numbers. With ``tensors_a_file`` there are several files; the first is returned.
    Raises ValueError for what such a file cannot say or is not written here.
    """
    config = read_model_config(checkpoint)
    if config.architecture not in _ARCHITECTURES:
        raise ValueError(f"{config.architecture} with this configuration is not written as GGUF")
    architecture, interleaved = _ARCHITECTURES[config.architecture]
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    _add_config(writer, config)
    _add_tokenizer(writer, checkpoint, config, pre_tokenizer)
    tensors = _tensors(checkpoint, config, architecture, interleaved=interleaved)
    for name, tensor in tensors.items():
        kind = _KINDS[dtype] if tensor.dim() > 1 else GGMLQuantizationType.F32
        if stored is not None and name in stored:
            data, kind = stored[name]
        else:
            data = gguf.quantize(np.ascontiguousarray(tensor.numpy()), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    count = len(writer.tensors)
    return path.with_name(f"{path.stem}-00001-of-{count:05}.gguf") if count > 1 else path


def _add_config(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    # llama.cpp adds nothing to this for a scaling of RoPE.
    writer.add_context_length(config.context_window_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.experts is not None:
        writer.add_expert_count(config.experts.num_experts)
        writer.add_expert_used_count(config.experts.num_chosen)
        if config.architecture.startswith("Qwen"):
            writer.add_expert_feed_forward_length(config.experts.intermediate_size)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        slides = [layer in config.sliding_layers for layer in range(config.num_hidden_layers)]
        if not all(slides):
            writer.add_sliding_window_pattern(slides)
    if not config.has_head:
        writer.add_pooling_type(gguf.PoolingType.LAST)
    match config.rope_scaling:
        case None | {"rope_type": "llama3"}:
            pass  # as a tensor of factors
        case {"rope_type": "linear", "factor": factor}:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(factor)
            writer.add_rope_scaling_orig_ctx_len(original)
        case scaling:
            raise ValueError(f"RoPE scaling {scaling['rope_type']} is not written as GGUF")


def _add_tokenizer(
    writer: GGUFWriter, checkpoint: Path, config: ModelConfig, pre_tokenizer: str | None
) -> None:
    spec = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    ids: dict[str, int] = spec["model"]["vocab"] | {
        token["content"]: token["id"] for token in spec["added_tokens"]
    }
    tokens = [f"[PAD{token_id}]" for token_id in range(config.vocab_size)]
    types = [TokenType.UNUSED] * config.vocab_size
    for text, token_id in ids.items():
        tokens[token_id], types[token_id] = text, TokenType.NORMAL
    for token in spec["added_tokens"]:
        is_special = token["special"]
        types[token["id"]] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
    merges = [tuple(merge) for merge in spec["model"]["merges"]]
    if spec["model"].get("byte_fallback"):
        _add_scores(writer, tokens, types, merges)
        writer.add_add_space_prefix(_has_space_prefix(spec))
    else:
        if pre_tokenizer is None and not _GPT2_SPLITTER.items() <= spec["pre_tokenizer"].items():
            raise ValueError("the tokenizer splits otherwise than GPT-2's: name its pre_tokenizer")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer or "gpt-2")
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _add_special_tokens(writer, spec, settings, ids)


def _add_scores(
    writer: GGUFWriter,
    tokens: list[str],
    types: list[TokenType],
    merges: list[tuple[str, ...]],
) -> None:
    """Add sentencepiece scores that follow the order of merges: the best is joined first."""
    rank_of: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        rank_of.setdefault("".join(merge), rank)
    scores = [-float(rank_of.get(token, len(merges))) for token in tokens]
    byte_ids = {f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)}
    for token_id, token in enumerate(tokens):
        if token in byte_ids:
            types[token_id] = TokenType.BYTE
        elif token == "<unk>":
            types[token_id] = TokenType.UNKNOWN
            writer.add_unk_token_id(token_id)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores)


def _has_space_prefix(spec: dict[str, Any]) -> bool:
    splitter, normalizer = (json.dumps(spec[name]) for name in ("pre_tokenizer", "normalizer"))
    return '"Prepend"' in normalizer or '"first"' in splitter or '"always"' in splitter


def _add_special_tokens(
    writer: GGUFWriter, spec: dict[str, Any], settings: dict[str, Any], ids: dict[str, int]
) -> None:
    bos, eos = (ids.get(settings.get(name, "")) for name in ("bos_token", "eos_token"))
    around = (spec.get("post_processor") or {}).get("single", [])
    first, last = (around[0], around[-1]) if around else ({}, {})
    if bos is not None:
        writer.add_bos_token_id(bos)
        writer.add_add_bos_token(first.get("SpecialToken", {}).get("id") == settings["bos_token"])
    if eos is not None:
        writer.add_eos_token_id(eos)
        writer.add_add_eos_token(last.get("SpecialToken", {}).get("id") == settings["eos_token"])
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def _tensors(
    checkpoint: Path, config: ModelConfig, architecture: str, *, interleaved: bool
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors in float32 by GGUF's names, experts in stacks."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    stored = open_tensors(checkpoint)
    for name, info in stored.items():
        tensor = stored.load(name, info.shape).float()
        projection = name.split(".")[-2]
        if interleaved and projection in heads:
            tensor = _interleaved(tensor, heads[projection])
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            merged = expert["before"] + expert["behind"]
            if "block_sparse_moe" in merged:
                merged = merged.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            experts.setdefault(merged, {})[int(expert["expert"])] = tensor
        else:
            tensors[_new_name(names, name)] = tensor
    for name, one in experts.items():
        tensors[_new_name(names, name)] = torch.stack([one[number] for number in sorted(one)])
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "llama3":
        plain = inverse_frequencies(msgspec.structs.replace(config, rope_scaling=None))
        tensors["rope_freqs.weight"] = plain / inverse_frequencies(config)
    return tensors


def _new_name(names: gguf.TensorNameMap, name: str) -> str:
    suffixes = (".weight", ".bias")
    # Checkpoints of embedding models omit the prefix.
    new_name = names.get_name(name, suffixes) or names.get_name(f"model.{name}", suffixes)
    if new_name is None:
        raise ValueError(f"tensor {name} has no name in GGUF")
    return new_name


def _interleaved(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head in the order 0, d/2, 1, d/2 + 1, ...; ``tensor`` (heads * d, ...)."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
