"""Applied settings of an adapter_config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from millrace.registry.checkpoints.json_fields import JsonFields, read_json_object
from millrace.schemas.errors import AdapterError, CheckpointError

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256
# Settings that must be absent, false or empty, with the advice for each.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA is not applied; train without it, or merge the adapter into the model",
    "modules_to_save": "whole modules beside the low-rank ones are not applied; merge the adapter "
    "into the model",
    "lora_bias": "biases are not applied; merge the adapter into the model",
    "fan_in_fan_out": "transposed weights are not read; none of the models served here has them",
    "target_parameters": "parameters of experts are not adapted; merge the adapter into the model",
    "trainable_token_indices": "tokens trained on their own are not applied; merge the adapter "
    "into the model",
    "layer_replication": "repeated layers are not applied; merge the adapter into the model",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt are not applied",
    "megatron_config": "Megatron's parallel layers are not read; convert the adapter",
    "use_qalora": "pooled inputs are not applied; train without use_qalora",
    "use_bdlora": "block-diagonal adapters are not applied; train without use_bdlora",
    "velora_config": "VeLoRA is not applied; train without it",
}
# Initializations that change the model's own weights.
_REFUSED_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterConfig(NamedTuple):
    """Rank and scale of each module; ``base`` is the name of the model that it was trained on."""

    path: Path
    base: str
    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module by its full name, from ``rank_pattern`` if it matches."""
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of B A: alpha / rank, or alpha / sqrt(rank) if rank-stabilized
        (Kalajdzievski, arXiv:2312.03732).
        """
        rank = self.rank_of(module)
        alpha = float(_by_pattern(self.alphas, module, self.alpha))
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the config in ``folder``.

    Raises:
        AdapterError: names the file and the field that is missing, malformed or not applied.
    """
    path = folder / CONFIG_FILE
    try:
        return _read(path)
    except CheckpointError as error:
        raise AdapterError(error.message) from error


def _read(path: Path) -> AdapterConfig:
    fields = JsonFields(path, read_json_object(path))
    kind = fields.string("peft_type", "")
    if kind != "LORA":
        raise AdapterError(
            f"{path}: field peft_type is {kind!r:.80}; only adapters of type LORA are supported."
        )
    for name, why in _REFUSED.items():
        if fields.get(name):
            raise AdapterError(f"{path}: field {name} is {fields.get(name)!r:.80}: {why}.")
    if fields.string("bias", "none") != "none":
        raise AdapterError(
            f"{path}: field bias is {fields.get('bias')!r:.80}: biases are not applied; merge the "
            "adapter into the model."
        )
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REFUSED_STARTS):
        raise AdapterError(
            f"{path}: field init_lora_weights is {start!r:.80}, which changes the model's own "
            "weights; convert it to plain LoRA when you save it, as PEFT's documentation says."
        )
    return AdapterConfig(
        path=path,
        base=fields.string("base_model_name_or_path", ""),
        rank=fields.positive_int("r"),
        alpha=fields.positive_float("lora_alpha"),
        is_rank_stabilized=fields.boolean("use_rslora", default=False),
        ranks=_pattern(fields, "rank_pattern"),
        alphas=_pattern(fields, "alpha_pattern"),
    )


def _pattern(fields: JsonFields, name: str) -> dict[str, Any]:
    pattern = fields.mapping(name) or {}
    for key, value in pattern.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise fields.bad(name, f"an object of positive numbers ({key!r:.80} is not)")
        try:
            re.compile(key)
        except re.error as error:
            raise fields.bad(
                name, f"an object of regular expressions ({key!r:.80}: {error})"
            ) from error
    return pattern


def _by_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first key that matches the end of a module's name, as PEFT does."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
