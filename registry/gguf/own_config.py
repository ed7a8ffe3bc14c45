"""Configuration of a GGUF model for Millrace's own engine, as in a checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType, Keys

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.gguf.gguf_file import GgufFile, GgufTensor
from millrace.registry.gguf.tensor_names import checkpoint_names
from millrace.schemas.errors import CheckpointError

# Types that the engine reads as wide numbers, with the names that ``config.json`` has for them.
_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
OWN_TYPES = frozenset(
    {
        *_DTYPES,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q2_K,
        GGMLQuantizationType.Q3_K,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
        GGMLQuantizationType.IQ4_NL,
        GGMLQuantizationType.IQ4_XS,
        GGMLQuantizationType.MXFP4,
    }
)
# Names of families by llama.cpp's name of an architecture. In its ``llama`` the family depends on
# experts and windows.
_LLAMA = "llama"
_FAMILIES = {_LLAMA: "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3moe": "Qwen3Moe"}
_SOFTMAX_GATES = (0, 1)
_ROPE_FACTORS = "rope_freqs.weight"
# Fields whose numbers multiply or bound values in other architectures, with the neutral number.
_NEUTRAL = {
    Keys.LLM.LOGIT_SCALE: 1.0,
    Keys.LLM.RESIDUAL_SCALE: 1.0,
    Keys.LLM.EMBEDDING_SCALE: 1.0,
    Keys.LLM.ATTN_LOGIT_SOFTCAPPING: 0.0,
    Keys.LLM.FINAL_LOGIT_SOFTCAPPING: 0.0,
    Keys.LLM.EXPERT_WEIGHTS_SCALE: 1.0,
    Keys.LLM.EXPERT_SHARED_COUNT: 0.0,
    Keys.LLM.LEADING_DENSE_BLOCK_COUNT: 0.0,
    Keys.LLM.NEXTN_PREDICT_LAYERS: 0.0,
    Keys.Attention.CLAMP_KQV: 0.0,
    Keys.Attention.MAX_ALIBI_BIAS: 0.0,
    Keys.Attention.SCALE: 0.0,
    Keys.Attention.TEMPERATURE_SCALE: 0.0,
    Keys.Rope.SCALING_ATTN_FACTOR: 1.0,
    Keys.Rope.SCALING_YARN_ATTN_FACTOR: 1.0,
    Keys.Rope.SCALING_YARN_EXT_FACTOR: 1.0,
    Keys.Rope.SCALING_YARN_LOG_MUL: 0.0,
}
# Old files have the factor of linear scaling under this name.
_OLD_LINEAR = "{arch}.rope.scale_linear"


class OwnConfig(NamedTuple):
    """Fields of a ``config.json``, or the reason why the own engine cannot compute the model."""

    fields: Mapping[str, Any]
    why_not: str = ""


class _NotOursError(Exception):
    """Property of a file that the own engine does not compute."""


def own_config(parts: list[GgufFile], *, has_head: bool) -> OwnConfig:
    """Return the configuration of a model in one or several files; the first has the metadata.

    Without ``has_head`` the model makes embeddings only.

    Raises:
        CheckpointError: the metadata contradict themselves; names the file and the key.
    """
    try:
        return OwnConfig(_Model(parts).config(has_head=has_head))
    except _NotOursError as error:
        return OwnConfig({}, str(error))


def is_own_architecture(architecture: str) -> bool:
    """Return whether the own engine has the family of an architecture."""
    return architecture in _FAMILIES


def has_quantized_matrix(parts: list[GgufFile]) -> bool:
    """Return whether any tensor of a model's files is quantized."""
    return any(tensor.kind not in _DTYPES for _, tensor in all_tensors(parts).values())


def all_tensors(parts: list[GgufFile]) -> dict[str, tuple[GgufFile, GgufTensor]]:
    """Return the tensors of all files of a model, each with its file.

    Raises:
        CheckpointError: a tensor is in two files.
    """
    tensors: dict[str, tuple[GgufFile, GgufTensor]] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: tensor {name!r:.80} is in another file, too.")
            tensors[name] = (part, tensor)
    return tensors


class _Model:
    def __init__(self, parts: list[GgufFile]) -> None:
        self._tensors = all_tensors(parts)
        self._fields = JsonFields(parts[0].path, parts[0].metadata)
        self._architecture = self._fields.string(Keys.General.ARCHITECTURE, "")

    def config(self, *, has_head: bool) -> dict[str, Any]:
        if self._architecture not in _FAMILIES:
            raise _NotOursError(f"its architecture is {self._architecture}")
        for key, neutral in _NEUTRAL.items():
            if self._fields.number(self._key(key)) not in (None, neutral):
                raise _NotOursError(f"it has {self._key(key)}")
        if not self._fields.boolean(self._key(Keys.Attention.CAUSAL), default=True):
            raise _NotOursError("its attention is not causal")
        num_experts = self._count(Keys.LLM.EXPERT_COUNT)
        self._check_tensors(is_mixtral=self._architecture == _LLAMA and num_experts > 0)
        num_heads = self._size(Keys.Attention.HEAD_COUNT)
        hidden = self._size(Keys.LLM.EMBEDDING_LENGTH)
        head_dim = self._size(Keys.Attention.KEY_LENGTH, hidden // num_heads)
        for key in (Keys.Attention.VALUE_LENGTH, Keys.Rope.DIMENSION_COUNT):
            if self._size(key, head_dim) != head_dim:
                raise _NotOursError(f"{self._key(key)} is not the keys' {head_dim}")
        num_layers = self._size(Keys.LLM.BLOCK_COUNT)
        config: dict[str, Any] = {
            "hidden_size": hidden,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._size(Keys.Attention.HEAD_COUNT_KV, num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._fields.positive_float(
                self._key(Keys.Attention.LAYERNORM_RMS_EPS)
            ),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "rope_theta": self._fields.positive_float(self._key(Keys.Rope.FREQ_BASE), 10_000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "dtype": self._dtype(),
        }
        config |= self._biases() | self._mlp(num_experts)
        windows = self._windows(num_layers)
        family = self._family(num_experts, has_windows=bool(windows))
        ending = "ForCausalLM" if has_head else "Model"
        return config | windows | {"architectures": [family + ending]}

    def _key(self, key: str) -> str:
        return key.format(arch=self._architecture)

    def _size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer, which may be stored as a list of equal ones for the layers."""
        key = self._key(key)
        value = self._fields.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise _NotOursError(f"{key} differs from layer to layer")
            return JsonFields(self._fields.path, {key: value[0]}).positive_int(key)
        return self._fields.positive_int(key, default)

    def _count(self, key: str) -> int:
        return int(self._fields.number(self._key(key)) or 0)

    def _check_tensors(self, *, is_mixtral: bool) -> None:
        shapes = {name: tensor.shape for name, (_, tensor) in self._tensors.items()}
        unknown = checkpoint_names(shapes, is_mixtral=is_mixtral).unknown
        if unknown:
            raise _NotOursError(f"its tensor {unknown[0]:.80} is not part of the architecture")
        for name, (_, tensor) in self._tensors.items():
            if tensor.kind not in OWN_TYPES:
                raise _NotOursError(f"its tensor {name:.80} is stored as {tensor.kind_name}")

    def _family(self, num_experts: int, *, has_windows: bool) -> str:
        if self._architecture != _LLAMA:
            return _FAMILIES[self._architecture]
        if num_experts:
            return "Mixtral"
        return "Mistral" if has_windows else "Llama"

    def _biases(self) -> dict[str, Any]:
        """Return which biases there are. Attention has all or none."""
        has = {
            module: f"blk.0.{module}.bias" in self._tensors
            for module in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        # In Qwen2 all but the output have one.
        is_qwen2 = self._architecture == "qwen2"
        if not is_qwen2 and len(set(has.values())) != 1:
            raise _NotOursError("only some projections of its attention have a bias")
        mlp = [f"blk.0.{module}.bias" in self._tensors for module in ("ffn_gate", "ffn_down")]
        return {"attention_bias": not is_qwen2 and has["attn_q"], "mlp_bias": all(mlp)}

    def _mlp(self, num_experts: int) -> dict[str, Any]:
        if not num_experts:
            return {"intermediate_size": self._size(Keys.LLM.FEED_FORWARD_LENGTH)}
        gate = self._count(Keys.LLM.EXPERT_GATING_FUNC)
        if gate not in _SOFTMAX_GATES:
            raise _NotOursError(f"{self._key(Keys.LLM.EXPERT_GATING_FUNC)} is {gate}, not softmax")
        inner = self._fields.get(self._key(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH))
        key = Keys.LLM.FEED_FORWARD_LENGTH if inner is None else Keys.LLM.EXPERT_FEED_FORWARD_LENGTH
        size = self._size(key)
        normalized = self._fields.boolean(self._key(Keys.LLM.EXPERT_WEIGHTS_NORM), default=True)
        if self._architecture == _LLAMA and not normalized:
            raise _NotOursError(f"{self._key(Keys.LLM.EXPERT_WEIGHTS_NORM)} is false")
        return {
            "num_experts": num_experts,
            "num_local_experts": num_experts,
            "num_experts_per_tok": self._size(Keys.LLM.EXPERT_USED_COUNT),
            "moe_intermediate_size": size,
            # Of layers without experts, which these files do not have.
            "intermediate_size": self._size(Keys.LLM.FEED_FORWARD_LENGTH, size),
            "norm_topk_prob": normalized,
        }

    def _windows(self, num_layers: int) -> dict[str, Any]:
        window = self._count(Keys.Attention.SLIDING_WINDOW)
        if not window:
            return {}
        pattern = self._fields.get(self._key(Keys.Attention.SLIDING_WINDOW_PATTERN))
        slides = [True] * num_layers
        if isinstance(pattern, list) and len(pattern) == num_layers:
            slides = [bool(slide) for slide in pattern]
        elif isinstance(pattern, int) and pattern > 0:
            # The last of so many layers has no window.
            slides = [layer % pattern < pattern - 1 for layer in range(num_layers)]
        elif pattern is not None:
            key = self._key(Keys.Attention.SLIDING_WINDOW_PATTERN)
            raise self._fields.bad(key, f"a positive integer or a list for {num_layers} layers")
        if self._architecture in (_LLAMA, "qwen3moe") and not all(slides):
            raise _NotOursError("only some of its layers have a sliding window")
        kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
        return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}

    def _dtype(self) -> str:
        """Return the type of the matrices: bfloat16 if any is quantized, else the narrowest."""
        kinds = {tensor.kind for _, tensor in self._tensors.values() if len(tensor.shape) > 1}
        if not kinds <= _DTYPES.keys():
            return "bfloat16"
        for kind in (GGMLQuantizationType.BF16, GGMLQuantizationType.F16):
            if kind in kinds:
                return _DTYPES[kind]
        return _DTYPES[GGMLQuantizationType.F32]

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        factor_key, old_key = self._key(Keys.Rope.SCALING_FACTOR), self._key(_OLD_LINEAR)
        factor = self._fields.number(factor_key) or self._fields.number(old_key) or 0.0
        # llama.cpp's default if there is a factor.
        kind = self._fields.string(self._key(Keys.Rope.SCALING_TYPE), "linear")
        is_scaled = kind != "none" and factor not in (0.0, 1.0)
        if kind not in ("none", "linear", "yarn"):
            raise _NotOursError(f"its RoPE scaling is {kind}")
        if _ROPE_FACTORS in self._tensors:
            if is_scaled:
                raise _NotOursError("it has factors of RoPE besides a scaling")
            return {"rope_type": "factors", "factors": self._rope_factors(head_dim)}
        if not is_scaled:
            return None
        if kind == "linear":
            return {"rope_type": "factors", "factors": [factor] * (head_dim // 2)}
        return self._yarn(factor)

    def _yarn(self, factor: float) -> dict[str, Any]:
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = self._size(
            Keys.Rope.SCALING_ORIG_CTX_LEN, self._size(Keys.LLM.CONTEXT_LENGTH)
        )
        for name, key in (
            ("beta_fast", Keys.Rope.SCALING_YARN_BETA_FAST),
            ("beta_slow", Keys.Rope.SCALING_YARN_BETA_SLOW),
        ):
            number = self._fields.number(self._key(key))
            if number is not None:
                scaling[name] = number
        return scaling

    def _rope_factors(self, head_dim: int) -> list[float]:
        file, tensor = self._tensors[_ROPE_FACTORS]
        if tensor.kind != GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
            raise CheckpointError(
                f"{file.path}: tensor {_ROPE_FACTORS} must be F32 of {head_dim // 2} numbers, got "
                f"{tensor.kind_name} of {list(tensor.shape)}."
            )
        try:
            with file.path.open("rb") as stream:
                stream.seek(tensor.offset)
                stored = stream.read(tensor.num_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{file.path} cannot be read: {error.strerror or error}."
            ) from error
        factors = np.frombuffer(stored, np.dtype("<f4"))
        if not np.isfinite(factors).all() or (factors <= 0).any():
            raise CheckpointError(
                f"{file.path}: tensor {_ROPE_FACTORS} must hold positive numbers."
            )
        return [float(factor) for factor in factors]
