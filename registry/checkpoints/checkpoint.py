"""Config of a decoder in a checkpoint in Hugging Face layout (``config.json``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from millrace.registry.checkpoints.classifier import ClassifierHead, read_classifier
from millrace.registry.checkpoints.families import (
    CLASSIFIER_ARCHITECTURES,
    EMBEDDING_ARCHITECTURES,
    SUPPORTED_ARCHITECTURES,
    Biases,
    ExpertsConfig,
    Family,
    family_of,
    read_experts,
    read_windows,
)
from millrace.registry.checkpoints.json_fields import JsonFields, read_json_object
from millrace.registry.checkpoints.quantization.reading import read_quantization
from millrace.registry.checkpoints.quantization.scheme import QuantizationConfig
from millrace.registry.checkpoints.rope_scaling import extended_window, read_rope
from millrace.registry.checkpoints.side_files import refuse_side_files
from millrace.registry.checkpoints.tensors import TensorIndex, TensorInfo, open_tensors
from millrace.schemas.errors import CheckpointError

__all__ = [
    "GGUF_FILE",
    "GGUF_IS_QUANTIZED",
    "GGUF_PARTS",
    "GGUF_WHY_NOT_OWN",
    "SUPPORTED_ARCHITECTURES",
    "CheckpointError",
    "ModelConfig",
    "ModelOutline",
    "TensorIndex",
    "TensorInfo",
    "gguf_parts",
    "open_tensors",
    "read_model_config",
    "read_model_outline",
    "why_not_own",
]

# Set in the config.json of a folder that stands for a GGUF file: the first of the model's files,
# all of them, whether any tensor is quantized, and the reason why the own engine cannot compute it.
GGUF_FILE = "gguf_file"
GGUF_PARTS = "gguf_parts"
GGUF_IS_QUANTIZED = "gguf_is_quantized"
GGUF_WHY_NOT_OWN = "gguf_why_not_own"
_GGUF_QUANTIZATION = QuantizationConfig(method="GGUF", rules=())
_DTYPES = ("bfloat16", "float16", "float32")


class ModelOutline(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a model that code other than the engine needs.

    ``rope_scaling`` is None for plain RoPE; otherwise it has the scaling's parameters and its kind
    under ``rope_type``. A checkpoint without ``has_head`` (of a language model) makes embeddings
    only, or label scores if it has a ``classifier``.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = None
    has_head: bool = True
    classifier: ClassifierHead | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def context_window_tokens(self) -> int:
        """Length of the longest sequence that has positions, RoPE scaling included."""
        return extended_window(self.max_position_embeddings, self.rope_scaling)


class ModelConfig(ModelOutline, frozen=True, kw_only=True):
    """Hyper-parameters of a decoder.

    - ``num_attention_heads`` is a multiple of ``num_key_value_heads``. ``head_dim`` is even and
      need not be ``hidden_size / num_attention_heads``.
    - ``attention_bias`` is for the q, k and v projections, ``attention_output_bias`` for o,
      ``mlp_bias`` for gate, up and down. ``qk_norm`` normalises each head's queries and keys before
      RoPE.
    - In the ``sliding_layers`` a token attends to ``sliding_window`` tokens, itself included. In
      the other layers it attends to all tokens before it.
    - ``dtype`` is the torch name of the type that the weights were made for. ``quantization`` says
      which weights are stored in fewer bits.
    """

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    dtype: str = "float32"
    quantization: QuantizationConfig | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Number of tokens that a token of each layer attends to, itself included; None is all."""
        sliding = frozenset(self.sliding_layers)
        return tuple(
            self.sliding_window if layer in sliding else None
            for layer in range(self.num_hidden_layers)
        )


def read_model_config(path: Path) -> ModelConfig:
    """Read ``config.json`` of the checkpoint folder ``path``.

    Raises:
        CheckpointError: names the file and the field that is missing, malformed or unsupported. For
            an unsupported architecture it lists the supported ones; for a GGUF file that only
            llama.cpp computes it has the reason.
    """
    fields = _fields(path)
    reason = fields.string(GGUF_WHY_NOT_OWN, "")
    if reason:
        raise CheckpointError(
            f"{fields.get(GGUF_FILE)} cannot be computed by Millrace's own engine: {reason}. Start "
            "it with --engine llamacpp, or name a checkpoint in Hugging Face layout."
        )
    architecture, family = _architecture(fields)
    config = config_of(fields, architecture, family)
    if fields.boolean(GGUF_IS_QUANTIZED, default=False):
        return msgspec.structs.replace(config, quantization=_GGUF_QUANTIZATION)
    return config


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return the GGUF files that the folder ``path`` stands for; none if it is a checkpoint.

    Raises:
        CheckpointError: the folder has no readable ``config.json``.
    """
    return tuple(Path(file) for file in _fields(path).strings(GGUF_PARTS))


def why_not_own(path: Path) -> str:
    """Return why the own engine cannot compute the GGUF file of the folder ``path``; empty if it
    can.

    Raises:
        CheckpointError: the folder has no readable ``config.json``.
    """
    return _fields(path).string(GGUF_WHY_NOT_OWN, "")


def config_of(fields: JsonFields, architecture: str, family: Family) -> ModelConfig:
    """Return the hyper-parameters of a decoder of a family from the fields of its ``config.json``.

    Raises:
        CheckpointError: as ``read_model_config`` does.
    """
    _refuse_unsupported(fields)
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.bad("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    num_layers = fields.positive_int("num_hidden_layers")
    max_position_embeddings = fields.positive_int("max_position_embeddings")
    rope_theta, rope_scaling = read_rope(fields, family.rope_theta, max_position_embeddings)
    sliding_window, sliding_layers = read_windows(fields, family, num_layers)
    is_classifier = architecture in CLASSIFIER_ARCHITECTURES
    asks_bias = fields.boolean("attention_bias", default=False)
    has_bias = asks_bias and family.biases is Biases.AS_CONFIGURED
    bos_ids = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_heads, family.head_dim),
        intermediate_size=fields.positive_int("intermediate_size"),
        vocab_size=fields.positive_int("vocab_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.positive_float("rms_norm_eps", family.rms_norm_eps),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_bias=has_bias or family.biases is Biases.QKV,
        attention_output_bias=has_bias,
        mlp_bias=family.mlp_bias and fields.boolean("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        experts=read_experts(fields, family, num_layers),
        has_head=not is_classifier and architecture not in EMBEDDING_ARCHITECTURES,
        classifier=read_classifier(fields) if is_classifier else None,
        dtype=_dtype(fields),
        quantization=read_quantization(fields),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def read_model_outline(path: Path, *, any_architecture: bool = False) -> ModelOutline:
    """Read ``config.json`` of the checkpoint folder ``path``, or of a folder that stands for a GGUF
    file.

    A GGUF file may have any architecture. With ``any_architecture``, for third-party engines, a
    folder may have any architecture and quantization too, and a GGUF file's own names are kept.

    Raises:
        CheckpointError: as ``read_model_config`` does.
    """
    fields = _fields(path)
    is_gguf = fields.get(GGUF_FILE) is not None
    if is_gguf and not any_architecture and not fields.string(GGUF_WHY_NOT_OWN, ""):
        return read_model_config(path)
    if not is_gguf:
        if not any_architecture or _is_ours(fields):
            return read_model_config(path)
        # Models for images or audio have the fields for text in a section of its own.
        fields = fields.with_section("text_config")
    bos_ids = fields.token_ids("bos_token_id")
    return ModelOutline(
        architecture=fields.string("model_type", ""),
        hidden_size=fields.positive_int("hidden_size"),
        vocab_size=fields.positive_int("vocab_size"),
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        has_head=fields.boolean("has_head", default=True),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _is_ours(fields: JsonFields) -> bool:
    """Return whether Millrace's own engine can compute the model."""
    try:
        _architecture(fields)
        _refuse_unsupported(fields)
    except CheckpointError:
        return False
    return True


def _fields(path: Path) -> JsonFields:
    file = path / "config.json"
    return JsonFields(file, read_json_object(file))


def _architecture(fields: JsonFields) -> tuple[str, Family]:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.bad("architectures", "a list with the model's class name")
    name: str = names[0]
    family = family_of(name)
    if family is None:
        raise CheckpointError(
            f"{fields.path}: architecture {name} is not supported; supported are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}, for embeddings "
            f"{', '.join(EMBEDDING_ARCHITECTURES)}, and for scores "
            f"{', '.join(CLASSIFIER_ARCHITECTURES)}."
        )
    return name, family


def _refuse_unsupported(fields: JsonFields) -> None:
    """Refuse features that would change the output if ignored. Raises CheckpointError."""
    if fields.string("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.bad("hidden_act", "silu")
    if not fields.boolean("is_causal", default=True):
        raise fields.bad("is_causal", "true: only causal attention is supported")
    quantization = read_quantization(fields)
    refuse_side_files(fields.path.parent, is_quantized=quantization is not None)


def _head_dim(
    fields: JsonFields, hidden_size: int, num_heads: int, family_default: int | None
) -> int:
    if fields.get("head_dim") is None and family_default is None and hidden_size % num_heads:
        raise fields.bad(
            "head_dim", f"given, as hidden_size {hidden_size} does not divide by {num_heads} heads"
        )
    head_dim = fields.positive_int("head_dim", family_default or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.bad("head_dim", "an even number, as RoPE rotates pairs")
    return head_dim


def _dtype(fields: JsonFields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.string(name, "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise fields.bad(name, f"one of {', '.join(_DTYPES)}")
    return dtype
