"""The training forward of the K3 architecture, as small functions over dictionaries of parameters.

One flat stream of packed documents [N, D]. Only KDA and attention cross tokens (`kernels.py`); everything else is cut
into seven pieces with static shapes that `Target(compiled=True)` compiles once each. AttnRes blocks live in one stacked
bank [n_blocks, N, D] with a 0/-inf validity per block. Golden: k3/cases.safetensors.

Parameters carry Hugging Face names; experts of a layer are stacked: `experts.w1|w3 [E, F, Z]`, `experts.w2 [E, Z, F]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.dims import Dims
from training.kernels import Kernels, Layout

Params = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with fp32 statistics, cast before the weight."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight.to(x.dtype)


def situ(gate: Tensor, up: Tensor, d: Dims) -> Tensor:
    """K3's activation in fp32, cast back."""
    g, u = gate.float(), up.float()
    bounded = d.situ * torch.tanh(g / d.situ) * torch.sigmoid(g)
    return (bounded * d.situ_linear * torch.tanh(u / d.situ_linear)).to(gate.dtype)


def mix(ps: Tensor, bank: Tensor, valid: Tensor, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """AttnRes mixture of the valid blocks and the prefix sum; ps [N, D], bank [B, N, D], valid [B] 0 or -inf."""
    vector = norm.float() * proj.float()[0]
    blocks, prefix = bank.float(), ps.float()
    score_blocks = (blocks * vector).sum(-1) * torch.rsqrt(blocks.square().mean(-1) + eps)
    score_prefix = (prefix * vector).sum(-1) * torch.rsqrt(prefix.square().mean(-1) + eps)
    weight = torch.softmax(torch.cat((score_blocks + valid[:, None], score_prefix[None])), 0)
    mixed = (weight[:-1, :, None] * blocks).sum(0) + weight[-1][:, None] * prefix
    return mixed.to(ps.dtype)


def kda_project(x: Tensor, p: Params, d: Dims) -> tuple[Tensor, ...]:
    """Before the convolution: u_q, u_k, u_v [N, P], g [N, H, D] fp32, beta [N, H] fp32, gate [N, P]."""
    u = tuple(F.linear(x, p[f"self_attn.{n}_proj.weight"]) for n in "qkv")
    r = F.linear(
        F.linear(x, p["self_attn.f_a_proj.weight"]), p["self_attn.f_b_proj.weight"]
    ).float()
    r = (r + p["self_attn.dt_bias"]).view(-1, d.kda_heads, d.kda_dim)
    decay = p["self_attn.A_log"].exp()[:, None]
    g = d.lower_bound * torch.sigmoid(decay * r)
    beta = torch.sigmoid(F.linear(x, p["self_attn.b_proj.weight"]).float())
    return (*u, g, beta, F.linear(x, p["self_attn.g_proj.weight"]))


def kda_activate(
    q: Tensor, k: Tensor, v: Tensor, d: Dims, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """After the convolution (fp32 sums [N, P]): SiLU, heads, l2 norm of q and k."""
    heads = (-1, d.kda_heads, d.kda_dim)
    q, k, v = (F.silu(y).view(heads) for y in (q, k, v))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def convolve(u: Tensor, weight: Tensor, position: Tensor, width: int) -> Tensor:
    """Causal depthwise convolution that stops at document starts, fp32; u [N, P], weight [P, 1, W]."""
    padded = F.pad(u, (0, 0, width - 1, 0)).float()
    total = torch.zeros_like(u, dtype=torch.float32)
    for j in range(width):
        reach = (position >= width - 1 - j).float()[:, None]
        total = total + padded[j : j + u.shape[0]] * weight[:, 0, j].float() * reach
    return total


def before_kda(
    ps: Tensor, bank: Tensor, valid: Tensor, position: Tensor, p: Params, d: Dims
) -> tuple[Tensor, ...]:
    """Mixture, norm, projections, convolution: q, k, v, g, beta, output gate."""
    h = mix(
        ps,
        bank,
        valid,
        p["self_attention_res_norm.weight"],
        p["self_attention_res_proj.weight"],
        d.eps,
    )
    x = rms(h, p["input_layernorm.weight"], d.eps)
    *u, g, beta, gate = kda_project(x, p, d)
    sums = (
        convolve(y, p[f"self_attn.{n}_conv1d.weight"], position, d.conv_width)
        for n, y in zip("qkv", u, strict=True)
    )
    return (*kda_activate(*sums, d, x.dtype), g, beta, gate)


def kda_output(o: Tensor, gate: Tensor, p: Params, d: Dims) -> Tensor:
    """Per-head norm, sigmoid gate (fp32), output projection; o [N, H, D]."""
    y = o.float()
    y = (
        y
        * torch.rsqrt(y.square().mean(-1, keepdim=True) + d.eps)
        * p["self_attn.o_norm.weight"].float()
    )
    y = y.flatten(1) * torch.sigmoid(gate.float())
    return F.linear(y.to(gate.dtype), p["self_attn.o_proj.weight"])


def mla_project(x: Tensor, p: Params, d: Dims) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, H, nope + rope], latent row [N, latent + rope], output gate [N, H * v]."""
    qa = rms(F.linear(x, p["self_attn.q_a_proj.weight"]), p["self_attn.q_a_layernorm.weight"], 1e-6)
    q = F.linear(qa, p["self_attn.q_b_proj.weight"]).view(-1, d.mla_heads, d.nope + d.rope)
    ckv = F.linear(x, p["self_attn.kv_a_proj_with_mqa.weight"])
    c = rms(ckv[:, : d.latent], p["self_attn.kv_a_layernorm.weight"], 1e-6)
    return q, torch.cat((c, ckv[:, d.latent :]), -1), F.linear(x, p["self_attn.g_proj.weight"])


def before_mla(ps: Tensor, bank: Tensor, valid: Tensor, p: Params, d: Dims) -> tuple[Tensor, ...]:
    """Mixture, norm, projections, expansion: q, k, v (v padded to the width of k), gate, latent row."""
    h = mix(
        ps,
        bank,
        valid,
        p["self_attention_res_norm.weight"],
        p["self_attention_res_proj.weight"],
        d.eps,
    )
    q, latent, gate = mla_project(rms(h, p["input_layernorm.weight"], d.eps), p, d)
    kv = F.linear(latent[:, : d.latent], p["self_attn.kv_b_proj.weight"])
    kv = kv.view(-1, d.mla_heads, d.nope + d.v_dim)
    shared = latent[:, None, d.latent :].expand(-1, d.mla_heads, -1)
    k = torch.cat((kv[..., : d.nope], shared), -1)
    v = F.pad(kv[..., d.nope :], (0, d.nope + d.rope - d.v_dim))
    return q, k, v, gate, latent


def mla_output(o: Tensor, gate: Tensor, p: Params) -> Tensor:
    """Sigmoid gate and output projection; o [N, H * v]."""
    return F.linear(o * torch.sigmoid(gate), p["self_attn.o_proj.weight"])


def mlp(x: Tensor, p: Params, prefix: str, d: Dims) -> Tensor:
    """Dense or shared MLP."""
    gate = F.linear(x, p[f"{prefix}.gate_proj.weight"])
    up = F.linear(x, p[f"{prefix}.up_proj.weight"])
    return F.linear(situ(gate, up, d), p[f"{prefix}.down_proj.weight"])


def route(x: Tensor, p: Params, d: Dims) -> tuple[Tensor, Tensor]:
    """Dense routing weights [N, E] fp32 (zero where not chosen) and the load [E]."""
    score = torch.sigmoid(F.linear(x.float(), p["block_sparse_moe.gate.weight"].float()))
    biased = score.detach() + p["block_sparse_moe.gate.e_score_correction_bias"]
    chosen = torch.zeros_like(score).scatter_(1, biased.topk(d.top_k, 1).indices, 1.0)
    weight = score * chosen
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * d.scaling
    return weight, chosen.sum(0)


def moe(x: Tensor, p: Params, d: Dims) -> tuple[Tensor, Tensor]:
    """Latent experts (all of them computed, twelve weighted by zero) plus shared experts; also the load."""
    weight, load = route(x, p, d)
    z = F.linear(x, p["block_sparse_moe.routed_expert_down_proj.weight"])
    gate = F.linear(z, p["block_sparse_moe.experts.w1"].flatten(0, 1))
    up = F.linear(z, p["block_sparse_moe.experts.w3"].flatten(0, 1))
    act = situ(gate, up, d).view(-1, d.n_experts, d.expert_width)
    act = (act.float() * weight[..., None]).to(x.dtype).flatten(1)
    y = F.linear(act, p["block_sparse_moe.experts.w2"].permute(1, 0, 2).flatten(1))
    y = rms(y, p["block_sparse_moe.routed_expert_norm.weight"], d.eps)
    y = F.linear(y, p["block_sparse_moe.routed_expert_up_proj.weight"])
    return y + mlp(x, p, "block_sparse_moe.shared_experts", d), load


def feed_forward(
    ps: Tensor, a: Tensor, keep: Tensor, bank: Tensor, valid: Tensor, p: Params, d: Dims
) -> tuple[Tensor, Tensor]:
    """Second half of a layer: prefix sum after attention, mixture, FFN; returns the prefix sum and the load."""
    ps = a + keep.to(a.dtype) * ps
    h = mix(ps, bank, valid, p["mlp_res_norm.weight"], p["mlp_res_proj.weight"], d.eps)
    x = rms(h, p["post_attention_layernorm.weight"], d.eps)
    if "mlp.gate_proj.weight" in p:
        return ps + mlp(x, p, "mlp", d), ps.new_zeros(d.n_experts, dtype=torch.float32)
    y, load = moe(x, p, d)
    return ps + y, load


def after_kda(
    o: Tensor,
    gate: Tensor,
    ps: Tensor,
    keep: Tensor,
    bank: Tensor,
    valid: Tensor,
    p: Params,
    d: Dims,
) -> tuple[Tensor, Tensor]:
    """KDA output and the FFN half."""
    return feed_forward(ps, kda_output(o, gate, p, d), keep, bank, valid, p, d)


def after_mla(
    o: Tensor,
    gate: Tensor,
    ps: Tensor,
    keep: Tensor,
    bank: Tensor,
    valid: Tensor,
    p: Params,
    d: Dims,
) -> tuple[Tensor, Tensor]:
    """MLA output (padding of v dropped) and the FFN half."""
    a = mla_output(o[..., : d.v_dim].flatten(1), gate, p)
    return feed_forward(ps, a, keep, bank, valid, p, d)


def final_hidden(ps: Tensor, bank: Tensor, valid: Tensor, p: Params, d: Dims) -> Tensor:
    """Output mixture and the last norm."""
    h = mix(
        ps, bank, valid, p["output_attn_res_norm.weight"], p["output_attn_res_proj.weight"], d.eps
    )
    return rms(h, p["norm.weight"], d.eps)


def head_loss(
    hidden: Tensor, targets: Tensor, weights: Tensor, answers: Tensor, head: Tensor
) -> Tensor:
    """Sums of one chunk's cross entropies, weighted and over answers only: [2] fp32."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    entropy = F.cross_entropy(logits, targets, reduction="none")
    return torch.stack(((entropy * weights).sum(), (entropy.detach() * answers).sum()))


@dataclass(slots=True)
class Traced:
    """What a forward leaves behind when asked: final hidden, taps, states and latents per layer, expert loads."""

    hidden: Tensor
    loads: list[Tensor]
    taps: list[Tensor] = field(default_factory=list[Tensor])
    states: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    latents: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    conv: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class Target:
    """The forward over packed documents; holds no parameters."""

    def __init__(self, dims: Dims, kernels: Kernels, compiled: bool = False) -> None:
        self.dims = dims
        self.kernels = kernels

        def piece(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._before_kda, self._after_kda = piece(before_kda), piece(after_kda)
        self._before_mla, self._after_mla = piece(before_mla), piece(after_mla)
        self._final, self.head_loss = piece(final_hidden), piece(head_loss)

    def __call__(
        self,
        ids: Tensor,
        layout: Layout,
        params: "LayeredParams",
        taps: tuple[int, ...] = (),
        keep_caches: bool = False,
    ) -> Traced:
        """ids [N] int64.  Returns hidden [N, D] (final norm applied) and what was asked for."""
        d = self.dims
        ps = F.embedding(ids, params.top["embed_tokens.weight"]).to(params.dtype)
        blocks: list[Tensor] = []
        # requires_grad as in later layers, so that layer 0 shares their compiled graph
        bank = ps.new_zeros(d.n_blocks, *ps.shape).requires_grad_(ps.requires_grad)
        valid = torch.full((d.n_blocks,), float("-inf"), device=ps.device)
        traced = Traced(ps, [])
        for i, p in enumerate(params.layers):
            start = i % d.block == 0
            keep = torch.full((), 0.0 if start else 1.0, device=ps.device)
            if i in d.mla_layers:
                q, k, v, gate, latent = self._before_mla(ps, bank, valid, p, d)
                if keep_caches:
                    traced.latents[i] = latent
                o = self.kernels.attention(q, k, v, layout)
            else:
                if keep_caches:
                    traced.conv[i] = self._conv_tail(ps, bank, valid, layout, p)
                q, k, v, g, beta, gate = self._before_kda(ps, bank, valid, layout.position, p, d)
                o, state = self.kernels.kda(q, k, v, g, beta, layout)
                if keep_caches:
                    traced.states[i] = state
            if start:
                blocks.append(ps)
                empty = [torch.zeros_like(ps)] * (d.n_blocks - len(blocks))
                bank = torch.stack(blocks + empty)
                valid = torch.full((d.n_blocks,), float("-inf"), device=ps.device)
                valid[: len(blocks)] = 0.0
            after = self._after_mla if i in d.mla_layers else self._after_kda
            ps, load = after(o, gate, ps, keep, bank, valid, p, d)
            if "mlp.gate_proj.weight" not in p:
                traced.loads.append(load)
            if i in taps:
                traced.taps.append(ps)
        traced.hidden = self._final(ps, bank, valid, params.top, d)
        return traced

    def _conv_tail(
        self, ps: Tensor, bank: Tensor, valid: Tensor, layout: Layout, p: Params
    ) -> Tensor:
        """The last W-1 convolution inputs of each document [3, n_docs, W-1, P], oldest first, zero-filled."""
        d = self.dims
        last = layout.starts[1:].long() - 1
        back = torch.arange(d.conv_width - 2, -1, -1, device=ps.device)
        rows = last[:, None] - back
        inside = rows >= layout.starts[:-1].long()[:, None]
        flat = rows.clamp(min=0).flatten()
        args = (ps[flat], bank[:, flat], valid)
        h = mix(
            *args, p["self_attention_res_norm.weight"], p["self_attention_res_proj.weight"], d.eps
        )
        u = kda_project(rms(h, p["input_layernorm.weight"], d.eps), p, d)[:3]
        tail = torch.stack([y.view(*rows.shape, -1) for y in u])
        return tail * inside[None, :, :, None]


@dataclass(slots=True)
class LayeredParams:
    """Parameters split by layer, names relative to the layer; `top` holds the rest."""

    layers: list[dict[str, Tensor]]
    top: dict[str, Tensor]
    dtype: torch.dtype

    @staticmethod
    def of(flat: Mapping[str, Tensor], n_layers: int, dtype: torch.dtype) -> "LayeredParams":
        """Split `model.layers.{i}.*`, `model.*`, `lm_head.weight`."""
        layers: list[dict[str, Tensor]] = [{} for _ in range(n_layers)]
        top: dict[str, Tensor] = {}
        for name, tensor in sorted(flat.items()):
            short = name.removeprefix("model.")
            if short.startswith("layers."):
                _, number, rest = short.split(".", 2)
                layers[int(number)][rest] = tensor
            else:
                top[short] = tensor
        return LayeredParams(layers, top, dtype)
