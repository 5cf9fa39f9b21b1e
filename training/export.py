"""Model folders: Hugging Face names, MXFP4 experts, bf16 matrices, fp32 vectors, shards of at most 15 MB.

`to_hf` and `from_hf` translate between the training's stacked experts and checkpoint tensors; `write_shards` stores
them; `read_folder` loads any such folder (one file or shards) back.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training import mxfp4
from training.parameters import is_bf16

PREFIX = "language_model."
SHARD_BYTES = 14_500_000
_A_LOG_WIDTH = 128


def to_hf(flat: Mapping[str, Tensor], quantize: bool = True) -> dict[str, Tensor]:
    """Checkpoint tensors of fp32 values: experts split and packed (or bf16), A_log padded to 128."""
    out: dict[str, Tensor] = {}
    for name, value in flat.items():
        value = value.detach().cpu()
        if ".experts.w" in name:
            stem, matrix = name.rsplit(".", 1)
            for expert, weight in enumerate(value):
                hf = f"{PREFIX}{stem}.{expert}.{matrix}.weight"
                if quantize:
                    out[hf + "_packed"], out[hf + "_scale"] = mxfp4.pack(weight)
                else:
                    out[hf] = weight.bfloat16().contiguous()
        elif name.endswith("A_log"):
            padded = torch.zeros(_A_LOG_WIDTH)
            padded[: len(value)] = value
            out[PREFIX + name] = padded
        else:
            matrix = is_bf16(name) or name in ("model.embed_tokens.weight", "lm_head.weight")
            out[_hf_name(name)] = (value.bfloat16() if matrix else value.float()).contiguous()
    return out


def _hf_name(name: str) -> str:
    return PREFIX + name


def from_hf(tensors: Mapping[str, Tensor], n_kda_heads: int) -> dict[str, Tensor]:
    """fp32 values with stacked experts from checkpoint tensors, packed or not."""
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for full, value in tensors.items():
        name = full.removeprefix(PREFIX)
        if ".experts." in name and "shared_experts" not in name:
            stem, tail = name.split(".experts.")
            number, matrix, kind = tail.split(".")
            if kind == "weight_scale":
                continue
            if kind == "weight_packed":
                value = mxfp4.unpack(value, tensors[full.replace("_packed", "_scale")])
            experts.setdefault(f"{stem}.experts.{matrix}", {})[int(number)] = value.float()
        elif name.endswith("A_log"):
            out[name] = value.float().flatten()[:n_kda_heads]
        elif name.endswith("conv1d.weight"):
            out[name] = value.float().reshape(value.shape[0], 1, -1)
        else:
            out[name] = value.float()
    for name, parts in experts.items():
        out[name] = torch.stack([parts[i] for i in range(len(parts))])
    return out


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> list[Path]:
    """Write `model-0000x-of-0000y.safetensors` with its index; returns the shard paths."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in sorted(tensors.items(), key=_layer_order):
        n_bytes = tensor.numel() * tensor.element_size()
        if size + n_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += n_bytes
    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    paths: list[Path] = []
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, path.name)
        paths.append(path)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return paths


def _layer_order(item: tuple[str, Tensor]) -> tuple[int, str]:
    parts = item[0].split(".layers.")
    return (int(parts[1].split(".")[0]) if len(parts) > 1 else -1, item[0])


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors of a model folder."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no model*.safetensors; run the target phase first")
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= load_file(path)
    return json.loads((folder / "config.json").read_text()), tensors
