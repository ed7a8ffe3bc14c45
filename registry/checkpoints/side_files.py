"""Files beside the weights of a checkpoint: sampling defaults, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec

from millrace.registry.checkpoints.json_fields import read_json_object
from millrace.schemas.errors import CheckpointError, ParameterError
from millrace.schemas.sampling import SamplingDefaults, SamplingOptions

_QUANTIZED = (
    "says that the weights are quantized, and config.json, which the engine goes by, has no "
    "quantization_config; take a checkpoint that has, or remove the file if its weights are plain."
)
# They add nothing beside a config.json that has a quantization_config.
_QUANTIZATION_FILES = ("quantize_config.json", "hf_quant_config.json")
# Files for which a folder is refused, since its weights alone are not the described model.
REFUSED_FILES = {
    **dict.fromkeys(_QUANTIZATION_FILES, _QUANTIZED),
    "adapter_config.json": "describes an adapter, which is no part of the model beside it; move it "
    "to a folder of its own and offer it with --adapter NAME=FOLDER, or merge it into the weights.",
}
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_FILE = "generation_config.json"
_MAX_TOKENS = "max_new_tokens"


def refuse_side_files(path: Path, *, is_quantized: bool) -> None:
    """Refuse files in the folder ``path`` that make another model of its weights than the engine
    computes.

    ``is_quantized``: config.json has a quantization.

    Raises:
        CheckpointError: there is such a file; names it.
    """
    for name, why in REFUSED_FILES.items():
        if is_quantized and name in _QUANTIZATION_FILES:
            continue
        if (path / name).exists():
            raise CheckpointError(f"{path / name} {why}")


def ignored_parts(path: Path) -> list[str]:
    """Return a sentence on each part of the checkpoint folder ``path`` that the engine ignores, as
    transformers does by default.

    Raises:
        CheckpointError: the config is invalid.
    """
    sentences = []
    if read_json_object(path / "config.json").get("auto_map"):
        sentences.append(
            f"{path / 'config.json'}: field auto_map is ignored: code of a checkpoint is not run; "
            "the built-in implementation of the architecture is used."
        )
    if (path / _ADAPTER_WEIGHTS).exists():
        sentences.append(f"{path / _ADAPTER_WEIGHTS} is ignored: it has no adapter_config.json.")
    return sentences


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """Return the sampling defaults that the checkpoint folder ``path`` recommends.

    Other servers use the same fields: ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty`` and ``max_new_tokens``. Empty without the file.

    Raises:
        CheckpointError: no request may have such a value; names file and field.
    """
    file = path / _FILE
    if not file.is_file():
        return SamplingDefaults()
    data = read_json_object(file)
    names = {_MAX_TOKENS if name == "max_tokens" else name: name for name in _FIELDS}
    given = {names[name]: data[name] for name in names if data.get(name) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM uses -1 for off
    try:
        msgspec.convert(given, SamplingOptions)
        return msgspec.convert(given, SamplingDefaults)
    except (ParameterError, msgspec.ValidationError) as error:
        raise CheckpointError(
            f"{file}: {str(error).replace('max_tokens', _MAX_TOKENS)}. Correct it, or set "
            "generation_config: ignore for this model in the catalogue."
        ) from error


_FIELDS = SamplingDefaults.__struct_fields__
