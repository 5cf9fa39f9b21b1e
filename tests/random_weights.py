"""Random weights for a spec, where a test needs no checkpoint.

Linear layers std 1/sqrt(fan_in), norms about 1, A_log = log U(0.3, 1.5), dt_bias about -2, convolutions
mostly on the current token, embedding std 1: activations stay O(1) and routing is spread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from k3.model.names import LANGUAGE_PREFIX, model_tensors
from k3.model.spec import K3Spec
from tests.mxfp4 import pack


def random_tensors(spec: K3Spec, seed: int) -> dict[str, Tensor]:
    """Float32 tensors by checkpoint name (no prefix); experts packed when the spec says MXFP4."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, accepted in model_tensors(spec).items():
        if name.endswith(".weight_scale"):
            continue
        if name.endswith(".weight_packed"):
            rows, half = accepted[0]
            stem = name.removesuffix("_packed")
            weight = torch.randn(rows, 2 * half, generator=generator) * (2 * half) ** -0.5
            tensors[f"{stem}_packed"], tensors[f"{stem}_scale"] = pack(weight)
        else:
            tensors[name] = _initial(name, accepted[0], spec, generator)
    return tensors


def _initial(name: str, shape: tuple[int, ...], spec: K3Spec, generator: torch.Generator) -> Tensor:
    noise = torch.randn(*shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("A_log"):
        values = torch.zeros(shape)
        rates = torch.rand(spec.kda.n_heads, generator=generator) * 1.2 + 0.3
        values[: spec.kda.n_heads] = rates.log()
        return values
    if name.endswith("dt_bias"):
        return -2 + 0.5 * noise
    if name.endswith("conv1d.weight"):
        last = torch.zeros(shape)
        last[..., -1] = 0.8
        return last + 0.2 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    return noise * shape[-1] ** -0.5


def save_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors the way released folders look."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    prefixed = {LANGUAGE_PREFIX + name: t.contiguous() for name, t in tensors.items()}
    save_file(prefixed, folder / "model.safetensors", metadata={"format": "pt"})
