# ruff: noqa: TID251  (measures on torch.cuda)
"""Where a verify step of Kimi-K3 spends its time on one GPU: its layers at reduced depth, kernel by kernel.

    python benchmarks/stand_in.py [--rows 32] [--tokens 32768] [--group 8] [--eager]

Nine KDA and three MLA layers of real widths and all heads, with the experts that one rank of 16 holds, random weights
made on the card, MXFP4 experts as stored. Prints the captured step, the sum of its kernels' own times, the number of
launches and the kernels that take longest. Sampling and drafting are not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from k3_kernels.api import Backends, select
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from k3.model.batch import StageCaches, VerifyBatch
from k3.model.k3 import Stage
from k3.model.moe import Moe
from k3.model.names import model_tensors
from k3.model.registry import build_stage
from k3.model.spec import K3Spec

CONFIG = Path(__file__).resolve().parent.parent / "docs" / "examples" / "kimi-k3-config.json"
DEPTH, RANKS, PAGE = 12, 16, 64
LISTED = 24


@dataclass(frozen=True, slots=True)
class DrawnSource:
    """Tensors of a spec drawn on the card when they are read."""

    names: Mapping[str, tuple[int, ...]]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape."""
        return self.names

    def n_bytes(self, name: str) -> int:
        """Not stored anywhere."""
        del name
        return 0

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Linear layers of standard deviation 1/sqrt(inputs), norms of one, moderate gates."""
        assert not index, "one rank reads whole tensors"
        shape = self.names[name]
        if name.endswith("_packed"):
            return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        if name.endswith("_scale"):
            return torch.randint(118, 122, shape, dtype=torch.uint8, device="cuda")
        if name.endswith("norm.weight"):
            return torch.ones(shape, device="cuda")
        if name.endswith(("A_log", "dt_bias", "correction_bias")):
            return 0.1 * torch.randn(shape, device="cuda")
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5


def stand_in_spec() -> tuple[K3Spec, int]:
    """The spec whose experts are those of one rank, and how many experts there are in all."""
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    text = config["text_config"]
    n_experts = text["num_experts"]
    every_layer = text["linear_attn_config"]
    full = [i for i in every_layer["full_attn_layers"] if i <= DEPTH]
    linear = [i for i in range(1, DEPTH + 1) if i not in full]
    text["num_hidden_layers"] = DEPTH
    text["num_experts"] = n_experts // RANKS
    text["linear_attn_config"] = every_layer | {"full_attn_layers": full, "kda_layers": linear}
    return K3Spec.from_config(config), n_experts


def stand_in() -> Stage:
    """The stage; its routers choose among all experts, of which the first are here."""
    spec, n_experts = stand_in_spec()
    source = DrawnSource({name: shapes[0] for name, shapes in model_tensors(spec).items()})
    device = torch.device("cuda")
    ops = select(Backends(), device)
    stage = build_stage(spec, source, ops, dtype="bfloat16", device=device, moe_weights="packed")
    for layer in stage.layers:
        if isinstance(layer.ffn, Moe):
            layer.ffn.gate = layer.ffn.gate.repeat(n_experts // len(layer.ffn.gate), 1)
            layer.ffn.gate += torch.randn_like(layer.ffn.gate) * spec.hidden_size**-0.5
            layer.ffn.bias = 0.01 * torch.randn(n_experts, device=device)
    return stage


def caches(stage: Stage, rows: int, tokens: int, group: int) -> StageCaches:
    """Pools of `rows` requests of `tokens` tokens, filled with small numbers."""
    spec = stage.spec
    heads, dim, width = spec.kda.n_heads, spec.kda.head_dim, spec.kda.conv_width
    pages = rows * (-(-tokens // PAGE))
    kda = [i for i in stage.layer_range if not spec.is_mla(i)]

    def pool(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return 0.1 * torch.randn(shape, device="cuda", dtype=dtype)

    half = torch.bfloat16
    latent = spec.mla.kv_lora_rank + spec.mla.rope_dim
    return StageCaches(
        {i: pool(pages, PAGE, latent, dtype=half) for i in stage.layer_range if spec.is_mla(i)},
        {i: pool(rows, heads, dim, dim) for i in kda},
        {i: pool(rows, heads, 3, dim, width - 1, dtype=half) for i in kda},
        {i: pool(rows, heads, 3, group - 1, dim, dtype=half) for i in kda},
        records={i: -pool(rows, heads, 3, group, dim).abs() for i in kda},
    )


def batch(rows: int, tokens: int, group: int, vocab: int) -> VerifyBatch:
    """The last group of `rows` requests of `tokens` tokens, their pages in random order, half of a group accepted."""
    pages = -(-tokens // PAGE)
    table = torch.randperm(rows * pages, device="cuda").view(rows, pages)
    position = torch.arange(tokens - group, tokens, device="cuda").repeat(rows, 1)
    slot = table.gather(1, position // PAGE) * PAGE + position % PAGE
    return VerifyBatch(
        torch.randint(0, vocab, (rows * group,), device="cuda"),
        table.to(torch.int32),
        slot.flatten(),
        (position + 1).flatten().to(torch.int32),
        torch.arange(rows, device="cuda"),
        torch.full((rows,), max(0, group // 2 - 1), device="cuda"),
        group,
        tokens,
    )


def main() -> None:
    """Build, warm up, capture, time, profile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--eager", action="store_true", help="time the step uncaptured, too")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    started = time.monotonic()
    stage = stand_in()
    pools = caches(stage, arguments.rows, arguments.tokens, arguments.group)
    step = batch(arguments.rows, arguments.tokens, arguments.group, stage.spec.vocab_size)
    chosen = stage.ops.chosen

    def run() -> None:
        stage.logits(stage.hidden(stage.forward(None, pools, step).frame))

    run()
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated() / 1e9
    print(f"{chosen}, {used:.1f} GB, ready after {time.monotonic() - started:.0f} s")
    if arguments.eager:
        print(f"eager: {milliseconds(run):.2f} ms")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    captured = milliseconds(graph.replay)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        graph.replay()
        torch.cuda.synchronize()
    report(captured, recorded)


def milliseconds(call: Callable[[], None], repeats: int = 12) -> float:
    """Median over `repeats`, by events."""
    call()
    spans: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end))
    return statistics.median(spans)


def report(captured_ms: float, recorded: profile) -> None:
    """The step against the sum of its kernels, and the longest of these."""
    events = recorded.events() or []
    kernels = [event for event in events if event.device_time > 0]
    total = sum(event.device_time for event in kernels) / 1e3
    print(
        f"captured: {captured_ms:.2f} ms, kernels {total:.2f} ms in {len(kernels)} launches, "
        f"ratio {captured_ms / total:.3f}"
    )
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in kernels:
        spent[event.name] += event.device_time
        count[event.name] += 1
    for name, microseconds in spent.most_common(LISTED):
        print(f"{microseconds:9.0f} us {count[name]:4d} x {name[:110]}")


if __name__ == "__main__":
    main()
