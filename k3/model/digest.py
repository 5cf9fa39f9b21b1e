"""Which weights a model folder holds, without reading all of them: the identity two sides of a pair compare.

The digest covers config.json, and of every safetensors file its name, size, header (names, shapes, types, places of
all tensors) and evenly spaced samples of the data, so that a retrained checkpoint of the same shape differs too. Two
checkpoints that differ in a few values only may collide; that is the price of not reading terabytes at start-up.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from k3.errors import ModelError
from k3.model.spec import K3Spec

SAMPLES, SAMPLE_BYTES = 64, 4096
MAX_HEADER_BYTES = 100_000_000  # the safetensors limit
INDEX = "model.safetensors.index.json"


def model_id(spec: K3Spec) -> str:
    """Which kind of model it is, for people: architecture, layers, hidden size, vocabulary."""
    return f"{spec.architecture}-{spec.num_layers}x{spec.hidden_size}-v{spec.vocab_size}"


def model_digest(folder: Path) -> str:
    """SHA-256, hexadecimal, of the weights and the configuration in `folder`.

    Raises ModelError when the folder has no weights or a file is not safetensors.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: expected at least one .safetensors file, found none")
    digest = hashlib.sha256()
    for path in (folder / "config.json", folder / INDEX):
        if path.is_file():
            _add(digest, path.name.encode(), path.read_bytes())
    for path in files:
        _add(digest, path.name.encode(), _summary(path))
    return digest.hexdigest()


def _summary(path: Path) -> bytes:
    """Size, header and samples of one safetensors file, as one digest."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < header_bytes <= min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(
                f"{path}: not a safetensors file: a header of {header_bytes} bytes in a file of {size}; "
                "fetch the checkpoint again"
            )
        digest.update(file.read(header_bytes))
        last = max(8 + header_bytes, size - SAMPLE_BYTES)
        for i in range(SAMPLES):
            start = 8 + header_bytes
            file.seek(start + (last - start) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _add(digest: hashlib._Hash, *parts: bytes) -> None:
    """Feed parts with their lengths, so that no two different lists feed the same bytes."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
