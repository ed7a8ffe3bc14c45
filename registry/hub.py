"""Folders of the Hugging Face hub, by their ids: organisation/name[@revision]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from millrace.registry.artifacts.store import ModelSourceError
from millrace.runtime.addresses import exempt_loopback

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(source: str) -> bool:
    """Return whether a source is the id of a whole folder on the hub."""
    return _HUB_ID.fullmatch(source) is not None and not source.startswith(".")


def pinned(source: str, folder: Path) -> str:
    """Return the hub id with the commit of the copy ``folder``, if the folder's name is a
    commit.
    """
    repository = source.partition("@")[0]
    return f"{repository}@{folder.name}" if _COMMIT.fullmatch(folder.name) else source


def stored_file(source: str) -> Path | None:
    """Return the copy of a hub's file, organisation/name/path[@revision]; None if it is not here
    yet.
    """
    import huggingface_hub

    path, _, revision = source.partition("@")
    organisation, name, file = path.split("/", 2)
    found = huggingface_hub.try_to_load_from_cache(
        f"{organisation}/{name}", file, revision=revision or None
    )
    return Path(found) if isinstance(found, str) else None


def download(
    source: str, about: str, wanted_files: Sequence[str], unwanted_files: Sequence[str] = ()
) -> Path:
    """Return the folder with the files of a hub id that match ``wanted_files``.

    Missing files are fetched, with a progress bar on stderr.

    Raises:
        ModelSourceError: names ``about``, the purpose of the files.
    """
    import huggingface_hub
    from huggingface_hub import errors

    exempt_loopback()
    path, _, revision = source.partition("@")
    repository = "/".join(path.split("/")[:2])
    about = f"{about}: {repository}"
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(wanted_files),
            ignore_patterns=list(unwanted_files),
        )
    except errors.GatedRepoError as error:
        raise ModelSourceError(
            f"{about} is gated: accept its terms on the hub and set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelSourceError(
            f"{about} is neither a local folder nor a hub repository that you may read."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelSourceError(f"{about} has no revision {revision}.") from error
    except errors.HFValidationError as error:
        raise ModelSourceError(f"{about} is not a hub id: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise ModelSourceError(
            f"{about} cannot be fetched from the hub; check the network, or give a local folder. "
            f"({type(error).__name__})"
        ) from error
    return Path(folder)
