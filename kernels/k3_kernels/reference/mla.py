"""Latent attention over a paged cache: absorbed form for decode, expanded form for prefill.

A cache is one layer's strided view `[pages, P, C + R]` of the page-major pool. Causality comes from
per-token bounds alone: token t sees the first `bound_T[t]` keys of its row on this rank. A bound of 0
gives output 0 and lse -inf. Memory beyond the bounds may hold NaN (never written) or stale finite
values (rejected drafts): it is replaced before it is multiplied, not only masked in the scores.

Letters: T tokens, B rows, G tokens of a row's group (T = B * G), H heads, C latent width, R shared key
dims, K = C + R, N key dims of a head, V value dims, W pages of a row, P tokens per page, S keys.
Golden: helix/attn.safetensors, k3/cases.safetensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3_kernels.reference.precision import constant, wide

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SCORE_VALUES = 1 << 22  # scores held at once by the expanded form: bounds its memory


def write(cache_PTK: Tensor, slot_T: Tensor, latent_TK: Tensor) -> None:
    """Store latent rows at pool slots `page * P + offset`; slot -1 is not this rank's and is skipped."""
    owned = slot_T >= 0
    slot = slot_T[owned]
    page_tokens = cache_PTK.shape[1]
    page = torch.div(slot, page_tokens, rounding_mode="floor")
    cache_PTK[page, slot - page * page_tokens] = latent_TK[owned].to(cache_PTK.dtype)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What all layers of one step share: the pages to read and who sees what.

    pages_BW: page ids, cut to the pages below the host's bound; dead_BS: keys nobody of the row sees;
    hidden_BGS: keys a token does not see; empty_BG: tokens that see none.
    """

    pages_BW: Tensor
    dead_BS: Tensor
    hidden_BGS: Tensor
    empty_BG: Tensor


def plan_decode(
    page_table_BW: Tensor, bound_T: Tensor, group: int, max_bound: int, page_tokens: int
) -> DecodePlan:
    """max_bound: host upper bound of `bound_T`; no page beyond it is read."""
    n_pages = max(1, -(-max_bound // page_tokens))
    pages = page_table_BW[:, :n_pages].clamp(min=0).to(torch.int64)
    bound_BG = bound_T.view(-1, group)
    key_S = torch.arange(pages.shape[1] * page_tokens, device=bound_T.device, dtype=bound_T.dtype)
    hidden = key_S >= bound_BG.unsqueeze(-1)
    return DecodePlan(pages, hidden.all(1), hidden, bound_BG == 0)


def decode(
    q_THK: Tensor, cache_PTK: Tensor, plan: DecodePlan, scale: float, value_width: int
) -> tuple[Tensor, Tensor]:
    """Absorbed attention of verify groups. Returns o [T, H, C] and lse [T, H] (wide, natural log)."""
    n_tokens, n_heads, width = q_THK.shape
    n_rows, group = plan.empty_BG.shape
    keys = cache_PTK.index_select(0, plan.pages_BW.flatten()).view(n_rows, -1, width)
    keys = keys.to(q_THK.dtype)  # [B, S, K], a copy of the pages in use
    keys.masked_fill_(plan.dead_BS.unsqueeze(-1), 0)
    q = q_THK.reshape(n_rows, group * n_heads, width)
    score = (q @ keys.transpose(1, 2)).to(wide(q.dtype))  # [B, G * H, S]
    score.mul_(constant(scale, score))
    score = score.view(n_rows, group, n_heads, -1)
    score.masked_fill_(plan.hidden_BGS.unsqueeze(2), float("-inf"))
    lse = torch.logsumexp(score, -1)  # [B, G, H], -inf without keys
    p = torch.exp(score - lse.masked_fill(plan.empty_BG.unsqueeze(-1), 0).unsqueeze(-1))
    p = p.to(q.dtype).view(n_rows, group * n_heads, -1)
    o = p @ keys[..., :value_width]
    return o.view(n_tokens, n_heads, value_width), lse.view(n_tokens, n_heads)


def prefill(
    q_THD: Tensor,
    cache_PTK: Tensor,
    page_table_RW: Tensor,
    cu_lens: tuple[int, ...],
    starts: tuple[int, ...],
    kv_up_HDC: Tensor,
    scale: float,
) -> Tensor:
    """Expanded causal attention of several requests' chunks, their latents already written.

    q_THD: [T, H, N + R]; kv_up_HDC: [H, N + V, C]. Returns o [T, H, V].
    Request r's tokens sit at positions starts[r] + i and see positions up to their own.
    """
    rank = kv_up_HDC.shape[-1]
    shared = cache_PTK.shape[-1] - rank
    nope = q_THD.shape[-1] - shared
    page_tokens = cache_PTK.shape[1]
    out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], kv_up_HDC.shape[1] - nope)
    for r, start in enumerate(starts):
        lo, hi = cu_lens[r], cu_lens[r + 1]
        n_keys = start + hi - lo
        pages = page_table_RW[r, : -(-n_keys // page_tokens)].to(torch.int64)
        latent = cache_PTK.index_select(0, pages).view(-1, rank + shared)[:n_keys].to(q_THD.dtype)
        kv = torch.matmul(latent[:, :rank], kv_up_HDC.transpose(1, 2))  # [H, S, N + V]
        extra = latent[:, rank:].expand(kv.shape[0], -1, -1)
        key = torch.cat((kv[..., :nope], extra), -1)
        q = q_THD[lo:hi].transpose(0, 1)
        attend = causal_in_parts if q.device.type == "cpu" else causal
        out[lo:hi] = attend(q, key, kv[..., nope:], start, scale).transpose(0, 1)
    return out


def causal_in_parts(
    q_HTD: Tensor, key_HSD: Tensor, v_HSV: Tensor, start: int, scale: float
) -> Tensor:
    """`causal` by the CPU's flash kernel: the keys before the chunk without a mask, the chunk's own causally.

    A mask over all keys would cost three times the time; the parts are merged by their log-sum-exp.
    """
    value_width = v_HSV.shape[-1]
    width = max(value_width, q_HTD.shape[-1])  # the kernel wants one width
    q, key, v = (_widened(x, width).unsqueeze(0) for x in (q_HTD, key_HSD, v_HSV))
    own, own_lse = _flash(q, key[:, :, start:], v[:, :, start:], is_causal=True, scale=scale)[:2]
    if start:
        past, past_lse = _flash(q, key[:, :, :start], v[:, :, :start], scale=scale)[:2]
        own = torch.lerp(own, past, torch.sigmoid(past_lse - own_lse).unsqueeze(-1).to(own.dtype))
    return own[0, ..., :value_width]


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def causal(q_HTD: Tensor, key_HSD: Tensor, v_HSV: Tensor, start: int, scale: float) -> Tensor:
    """Token t sees keys 0 .. start + t. Query tiles keep the score matrix small."""
    n_heads, n_tokens, _ = q_HTD.shape
    tile = max(1, SCORE_VALUES // (n_heads * key_HSD.shape[1]))
    outputs: list[Tensor] = []
    for lo in range(0, n_tokens, tile):
        hi = min(lo + tile, n_tokens)
        n_keys = start + hi
        score = q_HTD[:, lo:hi] @ key_HSD[:, :n_keys].transpose(1, 2)
        score = score.to(wide(score.dtype)) * scale
        key_S = torch.arange(n_keys, device=score.device)
        position = torch.arange(start + lo, start + hi, device=score.device)
        score.masked_fill_(key_S > position.unsqueeze(-1), float("-inf"))
        outputs.append(torch.softmax(score, -1).to(v_HSV.dtype) @ v_HSV[:, :n_keys])
    return torch.cat(outputs, 1)
