"""From a catalogue entry to a folder with the model's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import CheckpointError, MillraceError

if TYPE_CHECKING:
    from registry.catalogue import ModelEntry

_WANTED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
    "modules.json",
    "*_Pooling/config.json",
)


class ModelSourceError(MillraceError, code="model_source_unavailable", http_status=503):
    """The hub does not give the model: unknown, not allowed, or out of reach."""


def resolve(entry: ModelEntry) -> Path:
    """The folder of the model's files; what a hub id lacks here is downloaded, with a progress bar
    on stderr.

    Raises CheckpointError for a folder that is no checkpoint, ModelSourceError for the hub's
    refusals and a network that is unreachable.
    """
    folder = Path(entry.source) if entry.is_local else _download(entry)
    if not folder.is_dir():
        raise CheckpointError(f"Model {entry.name}: the folder {folder} does not exist.")
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"Model {entry.name}: {folder} has no config.json; it must be a checkpoint in "
            "Hugging Face layout."
        )
    return folder


def _download(entry: ModelEntry) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = entry.source.partition("@")
    about = f"Model {entry.name}: {repository}"
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_WANTED_FILES)
        )
    except errors.GatedRepoError as error:
        raise ModelSourceError(
            f"{about} is gated: accept its terms on the hub and set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelSourceError(
            f"{about} is neither a local folder nor a model on the hub that you may read."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelSourceError(f"{about} has no revision {revision}.") from error
    except errors.HFValidationError as error:
        raise ModelSourceError(f"{about} is no hub id: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise ModelSourceError(
            f"{about} cannot be fetched from the hub; check the network, or give a local folder. "
            f"({type(error).__name__})"
        ) from error
    return Path(folder)
