"""What the comparison with llama.cpp rests on: the GGUF file holds the checkpoint's numbers where ggml reads them."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from k3_kernels.reference.mxfp4 import unpack
from torch import Tensor

from benchmarks.k3_gguf import Converter, Kind, convert, metadata, mxfp4_blocks
from benchmarks.llama_child import interpreter
from k3.errors import ModelError
from k3.model.names import parameter_count
from k3.model.spec import K3Spec
from k3.model.weights import MemorySource, open_folder
from tests.mxfp4 import pack
from tests.random_weights import random_tensors

NANO = Path(__file__).parents[2] / "golden/k3"
SPEC = K3Spec.from_folder(NANO)


def read_gguf(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Metadata and float32 tensors, by the format's description and nothing of the writer."""
    with path.open("rb") as file:
        magic, version, n_tensors, n_values = struct.unpack("<4sIQQ", file.read(24))
        assert (magic, version) == (b"GGUF", 3)
        values = {_string(file): _value(file) for _ in range(n_values)}
        listed: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(n_tensors):
            name, (n,) = _string(file), struct.unpack("<I", file.read(4))
            sizes = struct.unpack(f"<{n}Q", file.read(8 * n))
            listed.append((name, sizes[::-1], *struct.unpack("<IQ", file.read(12))))
        start = -(-file.tell() // 32) * 32
        found = dict[str, Tensor]()
        for name, shape, kind, offset in listed:
            assert kind == Kind.F32
            assert offset % 32 == 0
            file.seek(start + offset)
            raw = bytearray(file.read(4 * torch.Size(shape).numel()))
            found[name] = torch.frombuffer(raw, dtype=torch.float32).view(shape)
    return values, found


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode()


def _value(file: BinaryIO) -> object:
    (kind,) = struct.unpack("<I", file.read(4))
    if kind == 8:
        return _string(file)
    if kind == 9:
        _, n = struct.unpack("<IQ", file.read(12))
        return struct.unpack(f"<{n}I", file.read(4 * n))
    form = {4: "<I", 6: "<f", 7: "<?"}[kind]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def test_file_holds_every_parameter_once(tmp_path: Path) -> None:
    convert(NANO, tmp_path / "nano.gguf", is_stored=False)
    values, found = read_gguf(tmp_path / "nano.gguf")
    assert values["general.architecture"] == "kimi-k3"
    assert values["kimi-k3.attention.head_count_kv"] == (0, 0, 0, 1, 0, 0, 0, 1, 1)
    # of a mixing site only the product of its two vectors is stored
    sites = 2 * SPEC.num_layers + 1
    expected = parameter_count(SPEC) - sites * SPEC.hidden_size
    assert sum(tensor.numel() for tensor in found.values()) == expected


def test_tensors_are_laid_out_as_llama_cpp_reads_them(tmp_path: Path) -> None:
    convert(NANO, tmp_path / "nano.gguf", is_stored=False)
    _, found = read_gguf(tmp_path / "nano.gguf")
    source = open_folder(NANO)
    ours = {name: source.read(name, ()).float() for name in source.shapes()}
    kda, mla = "model.layers.0.self_attn.", "model.layers.3.self_attn."
    assert torch.equal(found["token_embd.weight"], ours["model.embed_tokens.weight"])
    assert torch.equal(found["blk.0.ssm_g.weight"], ours[kda + "g_proj.weight"])
    assert torch.equal(found["blk.3.attn_gate.weight"], ours[mla + "g_proj.weight"])
    assert torch.equal(found["blk.0.ssm_a"], -ours[kda + "A_log"].flatten()[:4].exp())
    both_HOC = ours[mla + "kv_b_proj.weight"].view(4, 32, 32)  # 16 key, 16 value dims
    assert torch.equal(found["blk.3.attn_k_b.weight"].transpose(1, 2), both_HOC[:, :16])
    assert torch.equal(found["blk.3.attn_v_b.weight"], both_HOC[:, 16:])
    expert = ours["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    assert torch.equal(found["blk.1.ffn_up_exps.weight"][5], expert)


def test_blocks_of_mxfp4_hold_the_same_values() -> None:
    packed, scale = pack(torch.randn(3, 96, generator=torch.Generator().manual_seed(1)))
    blocks = mxfp4_blocks(packed, scale)
    assert blocks.shape == (3, 3, 17)
    # back to pairs of neighbours: bytes 1..16 hold inputs 0..15 low and 16..31 high
    codes = torch.cat((blocks[..., 1:] & 0xF, blocks[..., 1:] >> 4), -1).flatten(-2)
    again = codes[..., 0::2] | (codes[..., 1::2] << 4)
    expected = unpack(packed, scale, torch.float32)
    assert torch.equal(unpack(again, blocks[..., 0], torch.float32), expected)


def test_stored_form_keeps_bfloat16() -> None:
    tensors = random_tensors(SPEC, seed=2) | {
        "lm_head.weight": torch.randn(512, 64).to(torch.bfloat16)
    }
    entries = {e.name: e for e in Converter(SPEC, MemorySource(tensors), is_stored=True).entries()}
    head = entries["output.weight"]
    assert (head.kind, head.shape) == (Kind.BF16, (512, 64))
    data = torch.frombuffer(bytearray(head.data), dtype=torch.bfloat16).view(512, 64)
    assert torch.equal(data, tensors["lm_head.weight"])


def test_a_model_that_llama_cpp_cannot_hold_is_refused() -> None:
    softmax = replace(SPEC, moe=replace(SPEC.moe, router="softmax"))
    with pytest.raises(ModelError, match="cannot hold a router that is not sigmoid"):
        metadata(softmax)


def test_without_llama_cpp_the_way_to_install_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        interpreter(tmp_path / "python")
    assert left.value.code == 2
    assert "pip install --no-binary llama-cpp-python" in capsys.readouterr().err
