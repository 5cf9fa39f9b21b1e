"""Prefill chunks of Kimi-K3: causal attention over expanded latents, and the delta rule of a KDA layer.

Attention is measured between the expansion of keys and values and the output projection, beside torch's flash attention
(values widened to the keys' dims, as it wants them; one call for the keys before the chunk, one for its own, merged by
their log-sum-exps). The delta rule starts behind convolution and gate, beside the torch reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Row, Stopwatch, relative_error
from k3_kernels.reference import kda as reference
from k3_kernels.reference import mla
from k3_kernels.triton import kda_chunk, mla_prefill
from torch import Tensor
from torch.nn.functional import pad

TITLE = "Chunk prefill"
NOPE, SHARED, VALUE = 128, 64, 128
DIM = 128
PEER = "torch"


@dataclass(frozen=True, slots=True)
class ChunkCase:
    """Heads of a rank, tokens of the chunk, tokens before it."""

    what: str  # "MLA" | "KDA"
    heads: int
    tokens: int
    past: int = 0

    @property
    def name(self) -> str:
        """As in the table."""
        after = f" after {self.past}" if self.past else ""
        return f"{self.what} chunk, {self.heads} heads, {self.tokens} tokens{after}"


def cases() -> list[ChunkCase]:
    """All heads and an eighth of them."""
    return [
        ChunkCase("MLA", 96, 2048),
        ChunkCase("MLA", 96, 2048, 30720),
        ChunkCase("MLA", 12, 2048, 30720),
        ChunkCase("KDA", 96, 2048),
        ChunkCase("KDA", 12, 2048),
    ]


def run(case: ChunkCase, wanted: Callable[[str], bool]) -> list[Row]:
    """Ours and torch's."""
    torch.manual_seed(case.heads)
    return _attention(case, wanted) if case.what == "MLA" else _delta(case, wanted)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the card."""
    return torch.randn(*shape, device="cuda").to(dtype)


def _attention(case: ChunkCase, wanted: Callable[[str], bool]) -> list[Row]:
    heads, n, past = case.heads, case.tokens, case.past
    n_keys = past + n
    q = draw(n, heads, NOPE + SHARED)
    kv, shared = draw(n_keys, heads, NOPE + VALUE), draw(n_keys, SHARED)
    scale = (NOPE + SHARED) ** -0.5
    out = torch.empty(n, heads, VALUE, device="cuda", dtype=torch.bfloat16)
    n_pairs = n * past + n * (n + 1) // 2
    n_flops = 2.0 * heads * n_pairs * (NOPE + SHARED + VALUE)
    n_bytes = 2.0 * (q.numel() + kv.numel() + shared.numel() + out.numel())
    checked = slice(0, min(heads, 4))
    key = torch.cat((kv[..., :NOPE], shared[:, None].expand(-1, heads, -1)), -1)
    few_q, few_key, few_v = (
        x[:, checked].transpose(0, 1).double() for x in (q, key, kv[..., NOPE:])
    )
    want = mla.causal(few_q, few_key, few_v, past, scale).transpose(0, 1)
    widened = pad(kv[..., NOPE:], (0, SHARED))
    turned_q, turned_key, turned_v = (x.transpose(0, 1) for x in (q, key, widened))

    def ours() -> Tensor:
        mla_prefill.attend(q, kv, shared, past, scale, out)
        return out

    calls: dict[str, Callable[[], Tensor]] = {"ours": ours}
    if wanted(PEER):
        calls[PEER] = lambda: _flash(turned_q, turned_key, turned_v, past, scale)
    watch = Stopwatch(10)
    return [
        Row(
            case.name,
            backend,
            relative_error(call()[:, checked], want),
            1.5e-2,
            watch.time_us(call),
            n_bytes,
            n_flops,
            "keys and values expanded before",
        )
        for backend, call in calls.items()
    ]


def _flash(q_HTD: Tensor, key_HSD: Tensor, v_HSD: Tensor, past: int, scale: float) -> Tensor:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    q, key, v = (x.unsqueeze(0) for x in (q_HTD, key_HSD, v_HSD))
    own, own_lse = flash(q, key[:, :, past:], v[:, :, past:], is_causal=True, scale=scale)[:2]
    if past:
        before, lse = flash(q, key[:, :, :past], v[:, :, :past], scale=scale)[:2]
        own = torch.lerp(own, before, torch.sigmoid(lse - own_lse).unsqueeze(-1).to(own.dtype))
    return own[0, ..., :VALUE].transpose(0, 1)


def _delta(case: ChunkCase, wanted: Callable[[str], bool]) -> list[Row]:
    heads, n = case.heads, case.tokens
    wide = torch.float32
    joint = draw(n, heads, 3, DIM, dtype=wide)
    joint[:, :, :2] = reference.l2_normalize(joint[:, :, :2], 1e-6)
    q, k, v = joint.unbind(2)
    g = -5 * torch.rand(n, heads, DIM, device="cuda")
    beta = torch.rand(n, heads, device="cuda")
    state = draw(heads, DIM, DIM, dtype=wide)
    arguments = (q, k, v, g, beta, state)
    first = [x[:256].double() for x in (q, k, v, g, beta)]
    want = reference.chunk(first[0], first[1], first[2], first[3], first[4], state.double())[0]
    n_bytes = 4.0 * (5 * v.numel() + beta.numel() + 2 * state.numel())
    n_flops = 2.0 * n * heads * DIM * DIM * 3
    watch = Stopwatch(10)
    rows = [
        Row(
            case.name,
            "ours",
            relative_error(kda_chunk.delta(*arguments, lower_bound=-5.0)[0][:256], want),
            1e-4,
            watch.time_us(lambda: kda_chunk.delta(*arguments, lower_bound=-5.0)),
            n_bytes,
            n_flops,
            "float32 results",
        )
    ]
    if wanted(PEER):
        got = reference.chunk(*arguments)[0][:256]
        time_us = watch.time_us(lambda: reference.chunk(*arguments), captured=False)
        rows.append(
            Row(
                case.name, PEER, relative_error(got, want), 1e-4, time_us, n_bytes, n_flops, "eager"
            )
        )
    return rows


def missing_peers() -> list[str]:
    """Torch is here."""
    return []
