"""Router and routed experts of one rank of 16 of Kimi-K3, beside torch's grouped product.

A case has 56 of 896 experts, of which a token chooses 16: 256 tokens are a step of 32 rows with groups of 8, 2,048 a
prefill chunk. Bytes are those of the experts that somebody chose; bfloat16 experts are there for the peer's sake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Row, Stopwatch, relative_error
from k3_kernels.reference import moe as reference
from k3_kernels.reference.moe import DenseExperts, ExpertWeights, PackedExperts, Routing
from k3_kernels.reference.norm import situ
from k3_kernels.triton import moe, route
from k3_kernels.triton.moe_ops import TritonMoe
from torch import Tensor

TITLE = "MoE router and experts"
HIDDEN, Z, F = 7168, 3584, 3072
EVERYBODY, HELD, TOP_K = 896, 56, 16
BETA, LINEAR_BETA = 4.0, 25.0
PEER = "grouped_mm"
ERROR_LIMIT = 8e-3  # bfloat16 after each of two products and the activation


@dataclass(frozen=True, slots=True)
class MoeCase:
    """What is measured, on how many tokens."""

    what: str  # "router" | "MXFP4 experts" | "bfloat16 experts"
    tokens: int

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.what}, {self.tokens} tokens"


def cases() -> list[MoeCase]:
    """A step of one row, of 32 rows with and without drafts, a prefill chunk."""
    sizes = (8, 32, 256, 2048)
    kinds = ("router", "MXFP4 experts", "bfloat16 experts")
    return [MoeCase(kind, n) for kind in kinds for n in sizes]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Random numbers on the card."""
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def make(what: str, held: int = HELD) -> ExpertWeights:
    """Random experts that keep activations near one."""
    if what.startswith("bf"):
        return DenseExperts(0, draw(held, 2 * F, Z, scale=Z**-0.5), draw(held, Z, F, scale=F**-0.5))

    def matrix(rows: int, width: int) -> tuple[Tensor, Tensor]:
        shape = (held, rows, width // 2)
        packed = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        shape = (held, rows, width // 32)
        return packed, torch.randint(118, 122, shape, dtype=torch.uint8, device="cuda")

    return PackedExperts(0, *matrix(2 * F, Z), *matrix(Z, F), torch.bfloat16)


def exact(weights: ExpertWeights) -> ExpertWeights:
    """In float64."""
    match weights:
        case DenseExperts(first, w13, w2):
            return DenseExperts(first, w13.double(), w2.double())
        case PackedExperts(first, p13, s13, p2, s2, _):
            return PackedExperts(first, p13, s13, p2, s2, torch.float64)
    raise AssertionError(type(weights))


def choices(tokens: int) -> tuple[Tensor, Tensor]:
    """Experts at random and weights, as a router gives them."""
    ids = torch.rand(tokens, EVERYBODY, device="cuda").argsort(-1)[:, :TOP_K].contiguous()
    weight = torch.rand(tokens, TOP_K, device="cuda")
    return ids, weight / weight.sum(-1, keepdim=True)


def run(case: MoeCase, wanted: Callable[[str], bool]) -> list[Row]:
    """Ours, torch's eager form, and the peer for bfloat16 experts."""
    torch.manual_seed(case.tokens)
    if case.what == "router":
        return _router(case)
    weights = make(case.what)
    ids, weight = choices(case.tokens)
    z = draw(case.tokens, Z)
    want = reference.experts(z.double(), ids, weight.double(), exact(weights), BETA, LINEAR_BETA)
    mine = ids[ids < HELD]
    n_used, n_pairs = mine.unique().numel(), mine.numel()
    of_weight = 17 / 32 if isinstance(weights, PackedExperts) else 2
    n_bytes = 3 * Z * F * of_weight * n_used + 2 * n_pairs * (2 * Z + 2 * F) + 4 * case.tokens * Z
    n_flops = 6.0 * Z * F * n_pairs
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count  # noqa: TID251
    prepared = TritonMoe(n_sms).prepare(weights)
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: moe.experts(z, ids, weight, prepared, BETA, LINEAR_BETA, n_sms)
    }
    if isinstance(weights, DenseExperts) and wanted(PEER) and not missing_peers():
        calls[PEER] = lambda: grouped(z, ids, weight, weights)
    watch = Stopwatch()
    note = f"{n_used} experts used by {n_pairs} pairs"
    return [
        Row(
            case.name,
            backend,
            relative_error(call(), want),
            ERROR_LIMIT,
            watch.time_us(call),
            n_bytes,
            n_flops,
            note,
        )
        for backend, call in calls.items()
    ]


def grouped(z: Tensor, ids: Tensor, weight: Tensor, weights: DenseExperts) -> Tensor:
    """The usual eager form on torch's grouped product, without a host read: all pairs sorted, those held first."""
    n_tokens, top_k = ids.shape
    local = ids.flatten().clamp(max=HELD)
    order = local.argsort(stable=True)
    ends = torch.searchsorted(local[order], torch.arange(1, HELD + 1, device=z.device))
    ends = ends.to(torch.int32)
    rows = z[order // top_k]
    inner = torch._grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        rows, weights.w13_EFZ.mT, offs=ends
    )
    gate, up = inner.chunk(2, -1)
    active = situ(gate, up, BETA, LINEAR_BETA)
    outputs = torch._grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        active, weights.w2_EZF.mT, offs=ends
    )
    held = torch.arange(n_tokens * top_k, device=z.device) < ends[-1]
    y = torch.empty_like(outputs)
    y[order] = torch.where(held[:, None], outputs, 0)
    return (weight.unsqueeze(1) @ y.view(n_tokens, top_k, -1).float()).squeeze(1)


def _router(case: MoeCase) -> list[Row]:
    x = draw(case.tokens, HIDDEN)
    gate = draw(EVERYBODY, HIDDEN, dtype=torch.float32, scale=HIDDEN**-0.5)
    bias = draw(EVERYBODY, dtype=torch.float32, scale=0.01)
    rule = Routing(TOP_K, "sigmoid", True, 1.0)
    n_bytes = 4.0 * gate.numel() + 2 * x.numel() + 12 * case.tokens * TOP_K
    n_flops = 2.0 * x.numel() * EVERYBODY
    want = reference.route(x.double(), gate.double(), bias.double(), rule)[1].sort(-1).values
    watch = Stopwatch()
    return [
        Row(
            case.name,
            backend,
            relative_error(call(x, gate, bias, rule)[1].sort(-1).values, want),
            1e-4,
            watch.time_us(lambda call=call: call(x, gate, bias, rule)),
            n_bytes,
            n_flops,
            "float32 accurate",
        )
        for backend, call in (("ours", route.route), ("torch", reference.route))
    ]


def missing_peers() -> list[str]:
    """torch's grouped product came with 2.8."""
    return [] if hasattr(torch, "_grouped_mm") else ["grouped_mm: not in this torch"]
