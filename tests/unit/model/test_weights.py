"""Loading: every tensor is taken or named in an error; shards, prefixes and vision are handled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3.errors import ModelError
from k3.model.names import LANGUAGE_PREFIX
from k3.model.registry import build_stage, open_stage
from k3.model.spec import K3Spec
from k3.model.weights import MemorySource, Weights, open_folder
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO, Mesh, Shard
from tests.compare import assert_close
from tests.model_runner import CPU, OPS, Pools, solo_stage
from tests.random_weights import random_tensors, save_checkpoint

NANO = Path(__file__).parents[2] / "golden/k3"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    return load_file(NANO / "model.safetensors")


def _folder(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text((NANO / "config.json").read_text())
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    return path


def _logits(folder: Path) -> Tensor:
    pools = Pools(solo_stage(folder, "float32"), 1, len(IDS))
    return pools.prefill(pools.requests[0], IDS, 3)


def test_prefix_is_optional_and_vision_is_skipped(tmp_path: Path, stored) -> None:
    plain = {k.removeprefix(LANGUAGE_PREFIX): v for k, v in stored.items()}
    plain |= {"vision_tower.block.weight": torch.zeros(3), "mm_projector.w": torch.zeros(2)}
    folder = _folder(tmp_path / "plain", plain)
    assert open_folder(folder).n_skipped == 2
    assert torch.equal(_logits(folder), _logits(NANO))


def test_a_file_that_was_cut_short_is_named(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    folder = _folder(tmp_path / "m", stored)
    source = open_folder(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"of \S+/m/model\.safetensors: "):
        source.read(next(iter(source.shapes())), ())


def test_sharded_index_gives_the_same_model(tmp_path: Path, stored) -> None:
    names = sorted(stored)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    tmp_path.joinpath("config.json").write_text((NANO / "config.json").read_text())
    for file, part in shards.items():
        save_file({n: stored[n] for n in part}, tmp_path / file)
    weight_map = {n: file for file, part in shards.items() for n in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(_logits(tmp_path), _logits(NANO))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        open_folder(tmp_path)


def test_unpadded_decay_and_flat_convolutions_give_the_same_model(tmp_path: Path, stored) -> None:
    other = {
        k: v[:4] if k.endswith("A_log") else v[:, 0] if k.endswith("conv1d.weight") else v
        for k, v in stored.items()
    }
    assert torch.equal(_logits(_folder(tmp_path / "m", other)), _logits(NANO))


def test_missing_unknown_and_misshapen_tensors_are_all_listed_at_once(
    tmp_path: Path, stored
) -> None:
    broken = dict(stored)
    del broken["language_model.model.layers.3.self_attn.g_proj.weight"]
    broken["language_model.model.layers.2.self_attn.rotary.weight"] = torch.zeros(2)
    broken["language_model.model.norm.weight"] = torch.zeros(65)
    with pytest.raises(ModelError) as caught:
        solo_stage(_folder(tmp_path / "m", broken), "float32")
    message = str(caught.value)
    for part in (
        "layers.3.self_attn.g_proj",
        "layers.2.self_attn.rotary",
        "model.norm.weight [65]",
    ):
        assert part in message


def test_extra_layers_are_skipped(tmp_path: Path, stored) -> None:
    extra = {**stored, "language_model.model.layers.9.eh_proj.weight": torch.zeros(2)}
    assert torch.equal(_logits(_folder(tmp_path / "m", extra)), _logits(NANO))


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_broken_safetensors_file_is_refused_by_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_folder(tmp_path)


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="plain file names"):
        open_folder(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="safetensors"):
        open_folder(tmp_path)


def test_a_tensor_nobody_took_is_an_error_that_names_it() -> None:
    source = MemorySource({"a": torch.ones(2), "b": torch.ones(2)})
    weights = Weights(source, {"a", "b"}, torch.float32, CPU)
    weights.take("a")
    with pytest.raises(ModelError, match="neither loaded nor bound: b"):
        weights.finish()


def test_shards_together_are_the_whole_tensor() -> None:
    tensor = torch.arange(24.0).view(6, 4)
    weights = Weights(MemorySource({"w": tensor}), {"w"}, torch.float32, CPU)
    rows = [weights.take("w", shard=Shard(i, 3)) for i in range(3)]
    columns = [weights.take("w", axis=1, shard=Shard(i, 2)) for i in range(2)]
    assert torch.equal(torch.cat(rows), tensor)
    assert torch.equal(torch.cat(columns, 1), tensor)


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_stages_read_every_byte_once_and_report_it(pp: int) -> None:
    mesh, seen = Mesh(pp=pp), []
    total = 0
    for rank in range(pp):
        calls: list[tuple[int, int]] = []
        open_stage(
            NANO,
            mesh.place(rank),
            solo_groups(),
            OPS,
            dtype="float32",
            device=CPU,
            progress=lambda done, whole, calls=calls: calls.append((done, whole)),
        )
        assert calls[-1][0] == calls[-1][1]
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        total += calls[-1][1]
        seen.append(len(calls))
    source = open_folder(NANO)
    assert total == sum(source.n_bytes(name) for name in source.shapes())
    assert sum(seen) == len(source.shapes())


def test_random_weights_make_a_checkpoint_that_loads_to_the_same_model(tmp_path: Path) -> None:
    config = json.loads((NANO / "config-mxfp4.json").read_text())
    spec = K3Spec.from_config(config)
    tensors = random_tensors(spec, seed=5)
    save_checkpoint(tmp_path / "m", config, tensors)
    built = build_stage(spec, MemorySource(tensors), OPS, place=SOLO)
    pools = Pools(built, 1, len(IDS))
    logits = pools.prefill(pools.requests[0], IDS, 8)
    assert_close(_logits(tmp_path / "m"), logits, 1e-4, "logits")
    assert bool(logits.isfinite().all())
    assert 0.1 < float(logits.std()) < 10


@pytest.mark.parametrize("dtype", ["float16", "int8", "fp32"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ModelError, match=dtype):
        solo_stage(NANO, dtype)
