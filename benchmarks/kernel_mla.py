# ruff: noqa: TID251
"""Latent attention of decode steps at K3's widths, and the merge of context ranks: ours beside FlashMLA and FlashInfer.

All backends run behind the same operations, per-token bounds and natural-log lse included; a step's plan is made
before the clock starts, as it serves all layers. The pool holds two layers page-major, pages in random order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Row, Stopwatch, relative_error
from k3_kernels.api import AttentionOps
from k3_kernels.backends.flashinfer import FlashInferAttention
from k3_kernels.backends.flashmla import FlashMlaAttention
from k3_kernels.triton.combine import merge
from k3_kernels.triton.mla_ops import TritonAttention
from torch import Tensor

TITLE = "MLA decode and merge"
LATENT, SHARED, PAGE, SCALE = 512, 64, 64, 192**-0.5
WIDTH = LATENT + SHARED
ERROR_LIMIT = 0.01  # bfloat16 p and o


@dataclass(frozen=True, slots=True)
class Attention:
    """One decode step: `rows` requests of `keys` keys, `group` tokens each."""

    heads: int
    group: int
    keys: int
    rows: int

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.heads} heads, {self.group} tok, {self.keys // 1024}k x {self.rows}"

    @property
    def n_flops(self) -> float:
        """Scores over all of a key, values over its latent."""
        return 2.0 * self.rows * self.group * self.heads * self.keys * (WIDTH + LATENT)

    @property
    def n_bytes(self) -> float:
        """Keys once, queries once, output once."""
        tokens = self.rows * self.group
        return 2.0 * (self.rows * self.keys * WIDTH + tokens * self.heads * (WIDTH + LATENT))


@dataclass(frozen=True, slots=True)
class Merge:
    """Partials of `ranks` ranks for `tokens` tokens and `heads` heads of `dim` values."""

    ranks: int
    tokens: int
    heads: int
    dim: int

    @property
    def name(self) -> str:
        """As in the table."""
        return f"merge of {self.ranks}, {self.tokens} tok, {self.heads} heads x {self.dim}"


def cases() -> list[Attention | Merge]:
    """The shapes of the quality bars, and a few between them."""
    return [
        Attention(96, 8, 32 << 10, 8),
        Attention(96, 8, 128 << 10, 8),
        Attention(96, 1, 32 << 10, 32),
        Attention(12, 1, 32 << 10, 8),
        Attention(12, 1, 128 << 10, 8),
        Attention(12, 8, 32 << 10, 8),
        Attention(12, 1, 4 << 10, 1),
        Attention(12, 8, 4 << 10, 1),
        Attention(96, 1, 4 << 10, 1),
        Attention(96, 8, 4 << 10, 1),
        Merge(8, 512, 12, LATENT),
        Merge(8, 512, 12, 128),
    ]


@dataclass(frozen=True, slots=True)
class Step:
    """Tensors of an attention case."""

    q_THK: Tensor
    cache_PTK: Tensor
    table_BW: Tensor
    bound_T: Tensor
    group: int

    def call(self, ops: AttentionOps) -> Callable[[], tuple[Tensor, Tensor]]:
        """One layer's decode, planned."""
        plan = ops.plan(self.table_BW, self.bound_T, self.group, int(self.bound_T.max()), PAGE)
        return lambda: ops.decode(self.q_THK, self.cache_PTK, plan, SCALE, LATENT)

    def expected(self) -> Tensor:
        """o [T, H, C] in float64, row by row."""
        rows: list[Tensor] = []
        for b, pages in enumerate(self.table_BW):
            bound_G = self.bound_T.view(-1, self.group)[b]
            key = self.cache_PTK[pages.long()].reshape(-1, WIDTH)[: int(bound_G.max())].double()
            q = self.q_THK.unflatten(0, (-1, self.group))[b].double()
            score = torch.einsum("ghk,sk->ghs", q, key) * SCALE
            hidden = torch.arange(key.shape[0], device=key.device) >= bound_G.unsqueeze(-1)
            score.masked_fill_(hidden.unsqueeze(1), float("-inf"))
            rows.append(torch.softmax(score, -1) @ key[:, :LATENT])
        return torch.cat(rows)


def make(case: Attention) -> Step:
    """Random keys and queries; group tokens see one key more each."""
    torch.manual_seed(case.keys + case.heads)
    n_pages = case.rows * case.keys // PAGE
    pool = torch.empty(n_pages, 2, PAGE, WIDTH, dtype=torch.bfloat16, device="cuda").normal_()
    table = torch.randperm(n_pages, device="cuda").int().view(case.rows, -1)
    bound = case.keys - case.group + 1 + torch.arange(case.group, device="cuda")
    bound_T = bound.repeat(case.rows).int()
    q = torch.randn(case.rows * case.group, case.heads, WIDTH, device="cuda").bfloat16()
    return Step(q, pool[:, 1], table, bound_T, case.group)


def _backends(wanted: Callable[[str], bool]) -> dict[str, AttentionOps]:
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    ours: dict[str, AttentionOps] = {"triton": TritonAttention(n_sms, hopper=True)}
    if wanted("flashmla") and "flashmla" not in _missing():
        ours["flashmla"] = FlashMlaAttention(n_sms)
    if wanted("flashinfer") and "flashinfer" not in _missing():
        ours["flashinfer"] = FlashInferAttention(n_sms, torch.device("cuda"))
    return ours


def _missing() -> dict[str, str]:
    reasons: dict[str, str] = {}
    for name, module in (("flashmla", "flash_mla"), ("flashinfer", "flashinfer")):
        try:
            __import__(module)
        except ImportError as error:
            reasons[name] = str(error)
    return reasons


def missing_peers() -> list[str]:
    """Libraries that cannot be imported here."""
    return [f"{name}: {reason}" for name, reason in _missing().items()]


def run(case: Attention | Merge, wanted: Callable[[str], bool]) -> list[Row]:
    """Check against float64, then time."""
    watch = Stopwatch()
    if isinstance(case, Merge):
        return [_run_merge(case, watch)]
    step = make(case)
    expected = step.expected()
    rows: list[Row] = []
    for name, ops in _backends(wanted).items():
        call = step.call(ops)
        error = relative_error(call()[0], expected)
        time_us = watch.time_us(call)
        rows.append(Row(case.name, name, error, ERROR_LIMIT, time_us, case.n_bytes, case.n_flops))
    return rows


def _run_merge(case: Merge, watch: Stopwatch) -> Row:
    torch.manual_seed(case.dim)
    shape = (case.ranks, case.tokens, case.heads)
    o, lse = (
        torch.randn(*shape, case.dim, device="cuda").bfloat16(),
        torch.randn(*shape, device="cuda"),
    )
    lse[1, ::3] = float("-inf")
    o[1, ::3] = float("nan")
    weight = torch.softmax(lse.double(), 0).unsqueeze(-1)
    expected = torch.where(weight == 0, 0.0, o.double() * weight).sum(0)
    error = relative_error(merge(o, lse)[0], expected)
    n_bytes = 2.0 * (o.numel() + o[0].numel()) + 4.0 * (lse.numel() + lse[0].numel())
    time_us = watch.time_us(lambda: merge(o, lse))
    return Row(case.name, "triton", error, ERROR_LIMIT, time_us, n_bytes, 0.0)
