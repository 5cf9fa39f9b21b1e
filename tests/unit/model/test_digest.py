"""The digest tells model folders apart without reading all weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from k3.config.resolve import EMBEDDED_MODEL
from k3.errors import ModelError
from k3.model.digest import model_digest, model_id
from k3.model.spec import K3Spec


def checkpoint(folder: Path, *, n_values: int = 100_001, name: str = "w") -> Path:
    """One tensor of `n_values` bytes, in the safetensors format."""
    folder.mkdir(exist_ok=True)
    entry = {"dtype": "U8", "shape": [n_values], "data_offsets": [0, n_values]}
    header = json.dumps({name: entry}).encode()
    data = bytes(i % 251 for i in range(n_values))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_same_files_give_the_same_digest_anywhere(tmp_path):
    one, two = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    (two / "README.md").write_text("not part of the model")
    assert model_digest(one) == model_digest(two)
    assert len(model_digest(one)) == 64


@pytest.mark.parametrize("what", ["config", "size", "name", "retrained", "index", "file name"])
def test_any_difference_that_matters_changes_the_digest(tmp_path, what):
    before = model_digest(checkpoint(tmp_path / "m"))
    weights = tmp_path / "m" / "model.safetensors"
    match what:
        case "config":
            (tmp_path / "m" / "config.json").write_text('{"a": 1}')
        case "size":
            checkpoint(tmp_path / "m", n_values=100_000)
        case "name":
            checkpoint(tmp_path / "m", name="v")
        case "retrained":
            weights.write_bytes(weights.read_bytes()[:-50_000] + bytes(50_000))
        case "index":
            (tmp_path / "m" / "model.safetensors.index.json").write_text("{}")
        case "file name":
            weights.rename(tmp_path / "m" / "other.safetensors")
    assert model_digest(tmp_path / "m") != before


@pytest.mark.parametrize("n_values", [1, 63, 4095, 4097])
def test_small_files_are_covered_to_the_last_byte(tmp_path, n_values):
    weights = checkpoint(tmp_path / "m", n_values=n_values) / "model.safetensors"
    before = model_digest(tmp_path / "m")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert model_digest(tmp_path / "m") != before


def test_a_folder_without_weights_or_with_broken_ones_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="found none"):
        model_digest(tmp_path)
    for content in (
        b"",
        b"abc",
        struct.pack("<Q", 10) + b"short",
        struct.pack("<Q", 0) + b"x" * 99,
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match="not a safetensors file"):
            model_digest(tmp_path)


def test_the_model_id_is_readable():
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    assert (
        model_id(spec)
        == f"KimiK3ForConditionalGeneration-{spec.num_layers}x{spec.hidden_size}-v{spec.vocab_size}"
    )
