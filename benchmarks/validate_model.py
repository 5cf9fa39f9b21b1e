"""Layers of Kimi-K3 with random weights, spread over the ranks of a decode group, and a step of them as a rank runs it.

A tensor is drawn by its name, so every layout of the same widths has the same weights. On GPUs: real widths, twelve
layers (nine KDA, three MLA) and the experts that one rank of 16 holds, which the group shares; routers choose among all
experts. On a CPU: four layers of small widths with all their experts, so that the program itself is tested.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from k3_kernels.api import Backends, select
from k3_kernels.layers import gate
from torch import Tensor

from decode_svc.ledger import Ledger
from decode_svc.rank.cuda_graphs import CudaGraphs, Sizes
from decode_svc.rank.graphs import Eager, GraphRunner
from decode_svc.rank.rows import RowTable
from decode_svc.rank.step import VerifyStep
from k3.bench import cost
from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.device import Device
from k3.model.k3 import Stage
from k3.model.moe import Moe
from k3.model.names import model_tensors
from k3.model.registry import build_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import Groups
from k3.parallel.mesh import Place
from k3.rpc.convert import sampling_to_proto, stop_to_proto
from k3.types import SamplingParams, StopParams
from k3.v1 import plan_pb2

CONFIG = Path(__file__).resolve().parent.parent / "docs" / "examples" / "kimi-k3-config.json"
PAGE = 64
ROOM = 1024  # tokens a request may grow by while it is measured
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_token": 2,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "routed_expert_hidden_size": 32,
    "v_head_dim": 16,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Shape(NamedTuple):
    """What a step works on: requests, tokens each of them holds, tokens of a verify group."""

    rows: int
    length: int
    group: int


@dataclass(frozen=True, slots=True)
class StandIn:
    """A model of random weights. share: routers know `share` times the experts that are here."""

    spec: K3Spec
    share: int
    dtype: str

    @property
    def sizes(self) -> cost.Sizes:
        """For the model of a step's time: of `top_k` choices, those that meet an expert which is here."""
        sizes = cost.Sizes.of(self.spec)
        return replace(sizes, top_k=sizes.top_k // self.share)

    @property
    def dense_parameters(self) -> int:
        """Of feed-forward layers without experts, which the model of a step's time leaves out."""
        spec = self.spec
        n_dense = spec.num_layers - self.sizes.moe_layers
        return n_dense * 3 * spec.hidden_size * spec.dense_width


def stand_in(device: str, depth: int) -> StandIn:
    """Real widths on a GPU, small ones on a CPU; `depth` layers."""
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    text, share, dtype = config["text_config"], 16, "bfloat16"
    linear = text["linear_attn_config"]
    if device == "cpu":
        text |= SMALL
        linear |= {"num_heads": 8, "head_dim": 16}
        share, dtype = 1, "float32"
    full = [i for i in linear["full_attn_layers"] if i <= depth]
    text["num_hidden_layers"] = depth
    text["num_experts"] //= share
    text["linear_attn_config"] = linear | {
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, depth + 1) if i not in full],
    }
    return StandIn(K3Spec.from_config(config), share, dtype)


@dataclass(frozen=True, slots=True)
class NamedDraws:
    """Tensors of a spec drawn on the device when they are read, always the same under one name."""

    names: Mapping[str, tuple[int, ...]]
    device: torch.device

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape."""
        return self.names

    def n_bytes(self, name: str) -> int:
        """Not stored anywhere."""
        del name
        return 0

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Linear layers of standard deviation 1/sqrt(inputs), norms of one, moderate gates."""
        whole = self._draw(name, self.names[name])
        return whole[index] if index else whole

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        make: dict[str, Any] = {"device": self.device, "generator": generator(name, self.device)}
        if name.endswith("_packed"):
            return torch.randint(0, 256, shape, dtype=torch.uint8, **make)
        if name.endswith("_scale"):
            return torch.randint(118, 122, shape, dtype=torch.uint8, **make)
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device)
        if name.endswith(("A_log", "dt_bias", "correction_bias")):
            return 0.1 * torch.randn(shape, **make)
        return torch.randn(shape, dtype=torch.bfloat16, **make) * shape[-1] ** -0.5


def generator(name: str, device: torch.device) -> torch.Generator:
    """Random numbers of a name."""
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def sharded(model: StandIn, place: Place, groups: Groups, device: Device) -> Stage:
    """One rank's share."""
    at = device.torch_device
    source = NamedDraws({n: shapes[0] for n, shapes in model_tensors(model.spec).items()}, at)
    ops = select(Backends(), at)
    stage = build_stage(
        model.spec, source, ops, place=place, groups=groups, dtype=model.dtype, device=at
    )
    for layer in stage.layers:
        if isinstance(layer.ffn, Moe) and model.share > 1:
            _widen(layer.ffn, model, layer.index)
    return stage


def _widen(moe: Moe, model: StandIn, layer: int) -> None:
    """Let the router choose among all experts, of which the first are here."""
    numbers = generator(f"router {layer}", moe.gate.device)
    shape = (moe.gate.shape[0] * model.share, moe.gate.shape[1])
    drawn = torch.randn(shape, device=moe.gate.device, generator=numbers)
    stored = (drawn * model.spec.hidden_size**-0.5).bfloat16()
    moe.gate = gate(moe.ops, stored.to(moe.bias.dtype))
    moe.bias = 0.01 * torch.randn(shape[0], device=moe.gate.device, generator=numbers)


def pages_of(shape: Shape, cp: int) -> int:
    """Pages a rank holds of one request."""
    return math.ceil((shape.length + ROOM) / (PAGE * cp))


class Caches:
    """Pools of one rank for all shapes of one group width, filled with small noise so that nothing meets zeros."""

    def __init__(
        self, model: StandIn, place: Place, device: Device, shapes: list[Shape], group: int
    ) -> None:
        """shapes: of this group width."""
        layout = build_layout(
            model.spec,
            place.mesh,
            0,
            page_tokens=PAGE,
            dtype=model.dtype,
            columns=1,
            records=group if group > 1 else 0,
        )
        cp = place.mesh.cp
        self.n_pages = max(shape.rows * pages_of(shape, cp) for shape in shapes)
        n_slots = 1 + max(shape.rows for shape in shapes)
        self.storage = Storage(layout, self.n_pages, n_slots, device.torch_device)
        for pool in self.storage.pools.values():
            pool.normal_(std=0.1)


def runner_of(device: Device, shape: Shape) -> GraphRunner:
    """Records steps where the device can."""
    if not device.can_capture:
        return Eager()
    return CudaGraphs(device, Sizes.up_to(shape.rows, shape.length + ROOM, shape.group), 8)


def step_of(
    stage: Stage, caches: Caches, device: Device, runner: GraphRunner, shape: Shape
) -> VerifyStep:
    """A step whose rows 1..rows hold `length` tokens each, their pages in random order."""
    n_rows, length, group = shape
    cp = stage.place.mesh.cp
    width = pages_of(shape, cp)
    table = RowTable(n_rows, width, group - 1, stage.spec.vocab_size, device.torch_device)
    order = torch.randperm(caches.n_pages, generator=generator("pages", torch.device("cpu")))
    pages = order[: n_rows * width].view(n_rows, width).tolist()
    for row in range(1, n_rows + 1):
        table.open(
            plan_pb2.OpenRow(
                row=row,
                epoch=1,
                base=length,
                anchor=row,
                draft_len=group - 1,
                pages=pages[row - 1],
                state_slot=row,
                sampling=sampling_to_proto(SamplingParams(temperature=0.0)),
                stop=stop_to_proto(StopParams(length + ROOM)),
            )
        )
    return VerifyStep(
        stage,
        caches.storage.caches(),
        table,
        Ledger(PAGE, cp),
        runner,
        device,
        max_rows=n_rows,
        group=group,
        depth=2,
    )
