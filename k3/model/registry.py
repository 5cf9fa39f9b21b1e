"""From a model folder to a `Stage` ready to run: the one constructor services call.

`STAGES` maps an architecture to its stage class; an architecture that the config reader accepts but no
class serves is refused here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from k3_kernels.api import Ops

from k3.errors import ModelError
from k3.model.k3 import Stage, stage_tensor_names
from k3.model.layers import torch_dtype
from k3.model.names import model_tensors
from k3.model.spec import K3_ARCHITECTURE, K3Spec
from k3.model.weights import Progress, TensorSource, Weights, check, open_folder
from k3.parallel.collectives import Groups, solo_groups
from k3.parallel.mesh import SOLO, Place

STAGES: dict[str, type[Stage]] = {K3_ARCHITECTURE: Stage}


def open_stage(
    folder: Path,
    place: Place,
    groups: Groups,
    ops: Ops,
    *,
    dtype: str,
    device: torch.device,
    moe_weights: str = "auto",
    exchange: str = "value",
    taps: tuple[int, ...] = (),
    tap_stream: str = "prefix",
    shared_embedding: bool = False,
    progress: Progress | None = None,
) -> Stage:
    """Load this rank's share of the model in `folder`.

    dtype: float64, float32 or bfloat16, whatever the checkpoint stores.
    moe_weights: dequant, packed, or auto (dequant on CPU, packed elsewhere).
    exchange: value, latent or gather, what context-parallel ranks send each other in an MLA layer.
    progress: called with (bytes done, bytes in all) after each tensor.
    Raises ModelError naming the field, tensor or file that does not fit.
    """
    return build_stage(
        K3Spec.from_folder(folder),
        open_folder(folder),
        ops,
        place=place,
        groups=groups,
        dtype=dtype,
        device=device,
        moe_weights=moe_weights,
        exchange=exchange,
        taps=taps,
        tap_stream=tap_stream,
        shared_embedding=shared_embedding,
        progress=progress,
    )


def build_stage(
    spec: K3Spec,
    source: TensorSource,
    ops: Ops,
    *,
    place: Place = SOLO,
    groups: Groups | None = None,
    dtype: str = "float32",
    device: torch.device | None = None,
    moe_weights: str = "auto",
    exchange: str = "value",
    taps: tuple[int, ...] = (),
    tap_stream: str = "prefix",
    shared_embedding: bool = False,
    progress: Progress | None = None,
) -> Stage:
    """The same from a spec and any source of tensors."""
    if spec.architecture not in STAGES:
        raise ModelError(f"architecture {spec.architecture}: no class serves it")
    device = device if device is not None else torch.device("cpu")
    if moe_weights == "auto":
        moe_weights = "dequant" if device.type == "cpu" else "packed"
    wanted = model_tensors(spec)
    check(source.shapes(), wanted, spec.num_layers)
    own = stage_tensor_names(spec, place, frozenset(wanted), shared_embedding)
    weights = Weights(source, own, torch_dtype(dtype), device, progress)
    stage = STAGES[spec.architecture](
        spec,
        place,
        groups if groups is not None else solo_groups(),
        ops,
        weights,
        moe_weights=moe_weights,
        exchange=exchange,
        taps=taps,
        tap_stream=tap_stream,
        shared_embedding=shared_embedding,
    )
    weights.finish()
    return stage
