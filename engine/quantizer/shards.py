"""Writes a checkpoint's tensors as they come, in files of a bounded size."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from millrace.registry.checkpoints.tensors import INDEX_FILE, SINGLE_FILE

_METADATA = {"format": "pt"}


class ShardWriter:
    """Holds up to ``shard_bytes`` of tensors in memory, or one that is larger."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """``tensor`` is on the CPU. Raises OSError or SafetensorError if a file cannot be
        written."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        # What shares memory with another is refused by the format.
        self._waiting[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._waiting_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, and an index if there are several files. Raises as ``add`` does."""
        self._write()
        if len(self._shards) == 1:
            self._part(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            name = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            self._part(number).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _write(self) -> None:
        part = self._part(len(self._shards))
        save_file(self._waiting, part, _METADATA)
        # The library makes files for the user alone; who may read the folder may read these.
        part.chmod(self._folder.stat().st_mode & 0o666)
        self._shards.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0
