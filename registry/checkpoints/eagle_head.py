"""Config of an EAGLE-3 head, in the layout in which heads are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from millrace.registry.checkpoints.checkpoint import ModelConfig, config_of
from millrace.registry.checkpoints.families import FAMILIES
from millrace.registry.checkpoints.json_fields import JsonFields, read_json_object
from millrace.registry.checkpoints.tensors import SINGLE_FILE, TensorIndex, open_tensors
from millrace.schemas.errors import CheckpointError

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Some are published under the names of older EAGLE heads, or of their layer's model.
_OLDER_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
# Prefixes of the tensors of a head's one layer.
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_PICKLED_FILE = "pytorch_model.bin"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
NUM_FEATURE_LAYERS = 3
# Settings in eagle_config that must have these values.
_USUAL = (
    ("use_aux_hidden_state", True, "EAGLE-3 heads take the hidden states of three layers"),
    ("use_input_layernorm_in_first_layer", True, "embeddings go through a norm"),
    ("use_last_layernorm", True, "logits are made of what is behind a norm"),
    ("use_mtp_layernorm", False, "features are taken as they are"),
)


class EagleHeadConfig(ModelConfig, frozen=True, kw_only=True):
    """Config of a decoder layer that drafts for a target from the target's hidden states.

    ``vocab_size`` and ``target_hidden_size`` are the target's. ``draft_vocab_size`` is the number
    of tokens that the head knows. ``feature_layers`` are layers of the target whose inputs are the
    features; the number of layers stands for the output of the last layer.
    ``norm_before_residual``: the layer adds to its normalised inputs. ``layer_prefix`` is the
    prefix of the layer's tensor names.
    """

    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    norm_before_residual: bool
    layer_prefix: str


def read_eagle_head(path: Path, target: ModelConfig) -> tuple[EagleHeadConfig, TensorIndex]:
    """Read ``config.json`` of the head in the folder ``path``, and index its tensors.

    Raises:
        CheckpointError: the head is of another kind, made for another target, or a field is missing
            or not supported; names the file and the field.
    """
    file = path / "config.json"
    fields = JsonFields(file, read_json_object(file))
    architecture = _architecture(fields)
    if not (path / SINGLE_FILE).exists() and (path / _PICKLED_FILE).exists():
        raise CheckpointError(
            f"{path} has its tensors in {_PICKLED_FILE}, which may run code when it is read: save "
            f"them as {SINGLE_FILE}, with safetensors.torch.save_file."
        )
    tensors = open_tensors(path)
    layer_prefix = _layer_prefix(tensors, architecture)
    _refuse_unsupported(fields)
    config = config_of(fields, architecture, FAMILIES["Llama"])
    _check_config(fields, config, target)
    # Heads are trained on short texts, and plain RoPE continues beyond them.
    window = max(config.max_position_embeddings, target.context_window_tokens)
    known: dict[str, Any] = msgspec.structs.asdict(config) | {"max_position_embeddings": window}
    head = EagleHeadConfig(
        **known,
        draft_vocab_size=fields.positive_int("draft_vocab_size", config.vocab_size),
        target_hidden_size=target.hidden_size,
        feature_layers=_feature_layers(fields, target.num_hidden_layers),
        norm_before_residual=fields.boolean("norm_before_residual", default=False),
        layer_prefix=layer_prefix,
    )
    if head.draft_vocab_size > head.vocab_size:
        raise fields.bad("draft_vocab_size", f"at most vocab_size ({head.vocab_size})")
    return head, tensors


def _architecture(fields: JsonFields) -> str:
    names = fields.strings("architectures")
    if not names:
        raise fields.bad("architectures", f"a list with {EAGLE3_ARCHITECTURES[0]}")
    if names[0] not in EAGLE3_ARCHITECTURES + _OLDER_ARCHITECTURES:
        raise CheckpointError(
            f"{fields.path}: {names[0]} is not an EAGLE-3 head; eagle3= takes heads of "
            f"architecture {' or '.join(EAGLE3_ARCHITECTURES)}, and draft= a smaller model."
        )
    return names[0]


def _layer_prefix(tensors: TensorIndex, architecture: str) -> str:
    for prefix in _LAYER_PREFIXES:
        if f"{prefix}hidden_norm.weight" in tensors:
            return prefix
    names = " or ".join(f"{prefix}hidden_norm.weight" for prefix in _LAYER_PREFIXES)
    kind = "an EAGLE-1 or EAGLE-2 head, or a whole model"
    raise CheckpointError(
        f"{tensors.path}: {architecture} has no tensor {names}, as every EAGLE-3 head has: "
        + (f"this is {kind}; take" if architecture in _OLDER_ARCHITECTURES else "take")
        + " an EAGLE-3 head, or a smaller model as draft=PATH."
    )


def _refuse_unsupported(fields: JsonFields) -> None:
    """Refuse features that would change the head's output if ignored. Raises CheckpointError."""
    if fields.positive_int("num_hidden_layers", 1) != 1:
        raise fields.bad("num_hidden_layers", "1: heads of several layers are not supported")
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window") is not False:
        raise fields.bad("sliding_window", "null: sliding windows are not supported in heads")
    inside = fields.inside("eagle_config")
    for name, usual, why in _USUAL:
        if inside.boolean(name, default=usual) is not usual:
            raise inside.bad(name, f"{str(usual).lower()}: {why}")
    if inside.positive_int("parallel_draft_step", 1) != 1:
        raise inside.bad("parallel_draft_step", "1: parallel drafts are not supported")
    if fields.number("logit_scale") not in (None, 1.0):
        raise fields.bad("logit_scale", "1 or absent")
    if fields.get("quantization_config") is not None:
        raise fields.bad("quantization_config", "absent: use a head with unquantized weights")


def _check_config(fields: JsonFields, config: ModelConfig, target: ModelConfig) -> None:
    if config.vocab_size != target.vocab_size:
        raise _made_for_another(fields, "vocab_size", "vocab_size", target.vocab_size)
    if fields.positive_int("target_hidden_size", config.hidden_size) != target.hidden_size:
        raise _made_for_another(fields, "target_hidden_size", "hidden_size", target.hidden_size)
    if (config.rope_scaling or {}).get("rope_type") == "dynamic":
        raise fields.bad("rope_scaling", "of a kind other than dynamic")


def _made_for_another(fields: JsonFields, field: str, targets: str, value: int) -> CheckpointError:
    expected = f"{value}, the model's {targets}: use a head that was made for this model"
    if fields.get(field) is None:
        field = "hidden_size"
    return fields.bad(field, expected)


def _feature_layers(fields: JsonFields, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are the features.

    Ids under ``eagle_config`` name layers by their output, ids beside it by their input, as the
    programs that write them do.
    """
    inside = fields.inside("eagle_config")
    for place, offset in ((inside, 1), (fields, 0)):
        if place.get(_LAYERS):
            ids = place.token_ids(_LAYERS)
            layers = tuple(layer + offset for layer in ids)
            if len(layers) != NUM_FEATURE_LAYERS or max(layers) > num_layers:
                raise place.bad(_LAYERS, f"{NUM_FEATURE_LAYERS} layers of the model's {num_layers}")
            return layers
    if num_layers <= NUM_FEATURE_LAYERS:
        raise inside.bad(_LAYERS, f"given, as the model has {num_layers} layers only")
    return 2, num_layers // 2, num_layers - 3
