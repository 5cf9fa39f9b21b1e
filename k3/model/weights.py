"""From a checkpoint folder to the tensors one rank holds.

`open_folder` lists what safetensors files contain (prefix stripped, vision skipped and counted),
`check` compares that with `names.model_tensors` and reports every unknown, missing and misshapen tensor
at once, and `Weights` hands out this rank's pieces by name. A name that a stage owns but never asked
for is an error at the end (`finish`): nothing is loaded by accident or left at random values.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3.errors import ModelError
from k3.model.names import LANGUAGE_PREFIX, VISION_PREFIXES, Shapes, layer_of
from k3.parallel.mesh import WHOLE, Shard

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # bytes done, bytes in all
LISTED = 12  # names shown of a long list


class TensorSource(Protocol):
    """A set of named tensors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape."""
        ...

    def n_bytes(self, name: str) -> int:
        """Stored size of one tensor."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """The slice `index` of a tensor (an empty tuple: all of it), on CPU, in its stored dtype."""
        ...


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Tensors already in memory, as those of tests are."""

    tensors: Mapping[str, Tensor]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def n_bytes(self, name: str) -> int:
        """Size of one tensor."""
        return self.tensors[name].numel() * self.tensors[name].element_size()

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """The slice, not copied."""
        return self.tensors[name][index] if index else self.tensors[name]


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    stored_name: str
    shape: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class FolderSource:
    """The text tensors of a folder of safetensors files. Files are opened when first read."""

    entries: Mapping[str, _Entry]
    n_skipped: int
    _open: dict[Path, safe_open] = field(default_factory=dict)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def n_bytes(self, name: str) -> int:
        """Bytes in the file."""
        return self.entries[name].n_bytes

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read only the asked slice. Raises ModelError that names the file."""
        entry = self.entries[name]
        try:
            if entry.path not in self._open:
                self._open[entry.path] = safe_open(str(entry.path), framework="pt", device="cpu")
            file = self._open[entry.path]
            stored = entry.stored_name
            return file.get_slice(stored)[index] if index else file.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read tensor {name} of {entry.path}: {error}") from error


def open_folder(folder: Path) -> FolderSource:
    """List the tensors of `folder`: model.safetensors, or the shards its index names.

    Raises ModelError for a missing file, a file that is not safetensors, a tensor stored twice.
    """
    entries: dict[str, _Entry] = {}
    n_skipped = 0
    for path in _files(folder):
        for stored_name, (shape, n_bytes) in _header(path).items():
            name = stored_name.removeprefix(LANGUAGE_PREFIX)
            if name.startswith(VISION_PREFIXES):
                n_skipped += 1
            elif name in entries:
                raise ModelError(f"tensor {name} is in both {entries[name].path} and {path}")
            else:
                entries[name] = _Entry(path, stored_name, shape, n_bytes)
    if n_skipped:
        log.info("skipped %d vision tensors of %s: text only", n_skipped, folder)
    return FolderSource(entries, n_skipped)


def _files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: expected JSON with a weight_map: {error}") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index}: shard names must be plain file names, got {outside}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder}: shards named by the index are missing: {_listed(missing)}")
        return [folder / name for name in names]
    if not single.is_file():
        raise ModelError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json; only "
            "safetensors checkpoints are read"
        )
    return [single]


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Name -> (shape, bytes), from the file's own header, without touching the data."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("header longer than the file")
            header = json.loads(file.read(length))
        return {
            name: (tuple(item["shape"]), item["data_offsets"][1] - item["data_offsets"][0])
            for name, item in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _listed(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return ", ".join(listed[:LISTED]) + more


def check(found: Mapping[str, tuple[int, ...]], wanted: Shapes, num_layers: int) -> None:
    """Compare a checkpoint with what the config says it holds. Raises ModelError listing everything.

    Tensors of layers beyond the last are multi-token-prediction extras of other releases: skipped
    with a warning.
    """
    beyond = [name for name in found if (layer_of(name) or 0) >= num_layers]
    if beyond:
        log.warning("skipped %d tensors of layers beyond %d", len(beyond), num_layers - 1)
    unknown = found.keys() - wanted.keys() - set(beyond)
    missing = wanted.keys() - found.keys()
    misshapen = [
        f"{name} {list(found[name])} instead of {list(accepted[0])}"
        for name, accepted in wanted.items()
        if name in found and found[name] not in accepted
    ]
    problems = [
        f"{len(names)} {what}: {_listed(names)}"
        for what, names in (
            ("missing tensors", missing),
            ("unknown tensors", unknown),
            ("tensors of another shape", misshapen),
        )
        if names
    ]
    if problems:
        raise ModelError(
            "checkpoint and config.json do not describe the same model: " + "; ".join(problems)
        )


class Weights:
    """Hands out one rank's tensors by name, in the model dtype or the one asked for."""

    def __init__(
        self,
        source: TensorSource,
        wanted: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        """wanted: the names this rank's stage owns; `finish` insists that all were taken."""
        self.source = source
        self.shapes = source.shapes()
        self.dtype = dtype
        self.device = device
        self._left = set(wanted)
        self._progress = progress
        self._total_bytes = sum(source.n_bytes(name) for name in self._left)
        self._done_bytes = 0

    def take(
        self,
        name: str,
        *,
        axis: int = 0,
        shard: Shard = WHOLE,
        dtype: torch.dtype | None = None,
        keep_dtype: bool = False,
    ) -> Tensor:
        """The piece `shard` of a tensor along `axis`. Raises ModelError when it cannot be read."""
        if name not in self.shapes:
            raise ModelError(f"tensor {name} is not in the checkpoint")
        index: tuple[slice, ...] = ()
        if shard.count > 1:
            index = (slice(None),) * axis + (shard.of(self.shapes[name][axis]),)
        tensor = self.source.read(name, index)
        self._count(name)
        # A copy always: what is read may be mapped from a file that someone replaces.
        return tensor.to(
            self.device, tensor.dtype if keep_dtype else dtype or self.dtype, copy=True
        )

    def _count(self, name: str) -> None:
        if name in self._left:
            self._left.remove(name)
            self._done_bytes += self.source.n_bytes(name)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)

    def finish(self) -> None:
        """Raises ModelError when a tensor of this stage was neither loaded nor bound."""
        if self._left:
            raise ModelError(
                f"{len(self._left)} tensors of this stage were neither loaded nor bound: "
                f"{_listed(self._left)}"
            )
