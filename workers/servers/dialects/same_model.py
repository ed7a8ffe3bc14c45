"""Whether a server has the catalogue's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.registry.served import ServedModel
from millrace.schemas.errors import ConfigError
from millrace.workers.engine_like import EngineFailedError

# Other tokenizers cut it otherwise.
PROBE_TEXT = "The mill stands by 7 streams, said Zoë: „Größe“, naïve 水車 {'a': [1, 2.5]}\n\tEnd."


def chosen_model(models: Any, served_name: str, server: str) -> dict[str, Any]:
    """The model to ask for, of those that /v1/models lists: ``served_name``, or the first. Raises
    EngineFailedError or ConfigError."""
    listed: list[dict[str, Any]] = []
    if isinstance(models, dict) and isinstance(models.get("data"), list):
        listed = [one for one in models["data"] if isinstance(one, dict) and "id" in one]
    if not listed:
        raise EngineFailedError(f"The {server} server lists no models.")
    found = [one for one in listed if served_name in ("", str(one["id"]))]
    if not found:
        raise ConfigError(
            f"The {server} server has no model {served_name!r} (worker.engine.served_name); it has "
            f"{', '.join(str(one['id']) for one in listed)}."
        )
    return found[0]


def check_probe(model: ServedModel, token_ids: Sequence[int] | None, server: str) -> None:
    """Raise ConfigError unless the server's tokens of ``PROBE_TEXT`` are those of the catalogue's
    model. It may put a beginning of the sequence before them."""
    own = list(model.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    if token_ids is None or list(token_ids)[-len(own) :] != own:
        raise ConfigError(
            f"The {server} server's tokenizer is not that of the catalogue's {model.entry.name}: "
            f"they are not the same model."
        )
