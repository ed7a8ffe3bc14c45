"""What lies beside a checkpoint's config.json and weights, and would change what they compute."""

from __future__ import annotations

from pathlib import Path

from millrace.registry.checkpoints.json_fields import read_json_object
from millrace.schemas.errors import CheckpointError

_QUANTIZED = (
    "says that the weights are quantized, and config.json, which the engine goes by, has no "
    "quantization_config; take a checkpoint that has, or remove the file if its weights are plain."
)
# Beside a config.json that says so, too, they add nothing.
_QUANTIZATION_FILES = ("quantize_config.json", "hf_quant_config.json")
# What a folder is refused for: its weights alone are not the model that it describes.
REFUSED_FILES = {
    **dict.fromkeys(_QUANTIZATION_FILES, _QUANTIZED),
    "adapter_config.json": "describes an adapter, which is no part of the model beside it; move it "
    "to a folder of its own and offer it with --adapter NAME=FOLDER, or merge it into the weights.",
}
_ADAPTER_WEIGHTS = "adapter_model.safetensors"


def refuse_side_files(path: Path, *, is_quantized: bool) -> None:
    """Raises CheckpointError naming the file that makes of the weights in the folder ``path``
    another model than the engine would compute; ``is_quantized`` is what config.json says."""
    for name, why in REFUSED_FILES.items():
        if is_quantized and name in _QUANTIZATION_FILES:
            continue
        if (path / name).exists():
            raise CheckpointError(f"{path / name} {why}")


def ignored_parts(path: Path) -> list[str]:
    """A sentence on each part of the checkpoint folder ``path`` that the engine leaves out, as
    transformers does if nothing else is asked of it. Raises CheckpointError for a bad config."""
    sentences = []
    if read_json_object(path / "config.json").get("auto_map"):
        sentences.append(
            f"{path / 'config.json'}: field auto_map is ignored: code of a checkpoint is not run, "
            "the architecture is computed as it is known here."
        )
    if (path / _ADAPTER_WEIGHTS).exists():
        sentences.append(f"{path / _ADAPTER_WEIGHTS} is ignored: it has no adapter_config.json.")
    return sentences
