"""What a checkpoint's ``generation_config.json`` says about sampling."""

from __future__ import annotations

from pathlib import Path

import msgspec

from millrace.registry.checkpoints.json_fields import read_json_object
from millrace.schemas.errors import CheckpointError, ParameterError
from millrace.schemas.sampling import SamplingDefaults, SamplingOptions

_FILE = "generation_config.json"
_MAX_TOKENS = "max_new_tokens"


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """The values that the checkpoint folder ``path`` recommends, those that servers of the field
    go by: ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and
    ``max_new_tokens``. Empty without the file.

    Raises CheckpointError naming file and field for a value that no request may have.
    """
    file = path / _FILE
    if not file.is_file():
        return SamplingDefaults()
    data = read_json_object(file)
    names = {_MAX_TOKENS if name == "max_tokens" else name: name for name in _FIELDS}
    given = {names[name]: data[name] for name in names if data.get(name) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's word for off
    try:
        msgspec.convert(given, SamplingOptions)
        return msgspec.convert(given, SamplingDefaults)
    except (ParameterError, msgspec.ValidationError) as error:
        raise CheckpointError(
            f"{file}: {str(error).replace('max_tokens', _MAX_TOKENS)}. Correct it, or set "
            "generation_config: ignore for this model in the catalogue."
        ) from error


_FIELDS = SamplingDefaults.__struct_fields__
