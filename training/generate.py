"""Batched generation with the training forward: packed prefill, then one cached step per token (a CUDA graph on GPU).

Caches: KDA state and convolution inputs per row, MLA latents [row, position]. `Ablation` zeroes one kind between
prefill and decode, which shows what an answer depends on.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from training.dims import Dims
from training.kernels import Layout
from training.target import (
    LayeredParams,
    Params,
    Target,
    feed_forward,
    final_hidden,
    kda_activate,
    kda_output,
    kda_project,
    mix,
    mla_output,
    mla_project,
    rms,
)

_PREFILL_TOKENS = 65_536


class Ablation(enum.Enum):
    """What is zeroed at the hand-over from prefill to decode."""

    NONE = "none"
    LATENTS = "zero_latents"
    STATES = "zero_states"


@dataclass(slots=True)
class Caches:
    """KDA layers: state [row, H, V, K] fp32, conv [3, row, W-1, P]; MLA layers: latents [row, T, C+R]; length [row]."""

    state: dict[int, Tensor]
    conv: dict[int, Tensor]
    latents: dict[int, Tensor]
    length: Tensor


class Generator:
    """Generates with one set of parameters. `forbidden` ids are never produced."""

    def __init__(
        self,
        target: Target,
        params: LayeredParams,
        eos: int,
        forbidden: Sequence[int],
        device: torch.device,
    ) -> None:
        self.target, self.params, self.dims = target, params, target.dims
        self.eos, self.device = eos, device
        self.barrier = torch.zeros(self.dims.vocab, device=device)
        self.barrier[list(forbidden)] = float("-inf")

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        temperature: Sequence[float] | float = 0.0,
        ablation: Ablation = Ablation.NONE,
    ) -> list[list[int]]:
        """Continuations up to and with the eos, at most `max_new` ids each."""
        rows = len(prompts)
        temperatures = (
            [temperature] * rows if isinstance(temperature, int | float) else list(temperature)
        )
        heat = torch.tensor(temperatures, device=self.device)
        caches, logits = self._prefill(prompts, max(map(len, prompts)) + max_new)
        _ablate(caches, ablation)
        out = torch.full((rows, max_new), self.eos, device=self.device)
        token = self._sample(logits, heat)
        done = token == self.eos
        out[:, 0] = token
        step = self._stepper(caches, token, heat)
        for at in range(1, max_new):
            token = step()
            out[:, at] = torch.where(done, self.eos, token)
            done |= token == self.eos
            if at % 8 == 0 and bool(done.all()):
                break
        return [_until(row, self.eos) for row in out.tolist()]

    def _stepper(self, caches: Caches, first: Tensor, heat: Tensor):
        """A function that advances every row by one token; captured as a graph on GPU."""
        token = first.clone()

        def advance() -> None:
            token.copy_(self._sample(self._decode(token, caches), heat))

        if self.device.type != "cuda":
            return lambda: (advance(), token.clone())[1]
        saved = {
            **{("s", i): x.clone() for i, x in caches.state.items()},
            **{("c", i): x.clone() for i, x in caches.conv.items()},
        }
        length = caches.length.clone()
        side = torch.cuda.Stream()  # noqa: TID251
        side.wait_stream(torch.cuda.current_stream())  # noqa: TID251
        with torch.cuda.stream(side):  # noqa: TID251
            advance()
        torch.cuda.current_stream().wait_stream(side)  # noqa: TID251
        graph = torch.cuda.CUDAGraph()  # noqa: TID251
        with torch.cuda.graph(graph):  # noqa: TID251
            advance()
        for (kind, i), value in saved.items():  # undo the warm-up step
            (caches.state if kind == "s" else caches.conv)[i].copy_(value)
        caches.length.copy_(length)
        token.copy_(first)

        def replay() -> Tensor:
            graph.replay()
            return token.clone()

        return replay

    def _sample(self, logits: Tensor, heat: Tensor) -> Tensor:
        """Greedy where the temperature is 0, Gumbel-max elsewhere; logits [row, V] fp32."""
        logits = logits + self.barrier
        noise = -torch.log(torch.empty_like(logits).exponential_() + 1e-20)
        warm = logits / heat.clamp(min=1e-3)[:, None] + noise
        return torch.where((heat > 0)[:, None], warm, logits).argmax(-1)

    def _prefill(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[Caches, Tensor]:
        """Run all prompts, in groups of bounded size; returns caches with `room` positions and the next logits."""
        d, device, rows = self.dims, self.device, len(prompts)
        width = d.kda_heads * d.kda_dim
        kda = [i for i in range(d.n_layers) if i not in d.mla_layers]
        dtype = self.params.dtype
        state = {
            i: torch.zeros(rows, d.kda_heads, d.kda_dim, d.kda_dim, device=device) for i in kda
        }
        conv = {
            i: torch.zeros(3, rows, d.conv_width - 1, width, device=device, dtype=dtype)
            for i in kda
        }
        latents = {
            i: torch.zeros(rows, room, d.latent + d.rope, device=device, dtype=dtype)
            for i in sorted(d.mla_layers)
        }
        caches = Caches(
            state, conv, latents, torch.tensor([len(p) for p in prompts], device=device)
        )
        logits: list[Tensor] = []
        first = 0
        while first < rows:
            last, total = first, 0
            while last < rows and (last == first or total + len(prompts[last]) <= _PREFILL_TOKENS):
                total += len(prompts[last])
                last += 1
            logits.append(self._prefill_group(prompts[first:last], caches, first))
            first = last
        return caches, torch.cat(logits)

    def _prefill_group(
        self, prompts: Sequence[Sequence[int]], caches: Caches, first: int
    ) -> Tensor:
        ids = torch.tensor([t for p in prompts for t in p], device=self.device)
        starts = torch.tensor([0, *(len(p) for p in prompts)]).cumsum(0)
        layout = Layout.of(starts, self.device)
        traced = self.target(ids, layout, self.params, keep_caches=True)
        row = torch.repeat_interleave(
            torch.arange(first, first + len(prompts), device=self.device),
            (starts[1:] - starts[:-1]).to(self.device),
        )
        for i, latent in traced.latents.items():
            caches.latents[i][row, layout.position] = latent
        here = slice(first, first + len(prompts))
        for i, state in traced.states.items():
            caches.state[i][here] = state
            caches.conv[i][:, here] = traced.conv[i].to(self.params.dtype)
        return self._logits(traced.hidden[layout.starts[1:].long() - 1])

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.params.top["lm_head.weight"].to(hidden.dtype)).float()

    def _decode(self, token: Tensor, caches: Caches) -> Tensor:
        """Logits after one more token per row; updates the caches in place."""
        d = self.dims
        ps = F.embedding(token, self.params.top["embed_tokens.weight"]).to(self.params.dtype)
        bank = ps.new_zeros(d.n_blocks, *ps.shape)
        valid = torch.full((d.n_blocks,), float("-inf"), device=ps.device)
        for i, p in enumerate(self.params.layers):
            start = i % d.block == 0
            norm, proj = p["self_attention_res_norm.weight"], p["self_attention_res_proj.weight"]
            h = ps if i == 0 else mix(ps, bank, valid, norm, proj, d.eps)
            x = rms(h, p["input_layernorm.weight"], d.eps)
            if i in d.mla_layers:
                a = _mla_step(x, p, d, caches.latents[i], caches.length)
            else:
                a = _kda_step(x, p, d, caches.state[i], caches.conv[i])
            if start:
                bank[i // d.block] = ps
                valid[: i // d.block + 1] = 0.0
            keep = torch.full((), 0.0 if start else 1.0, device=ps.device)
            ps, _ = feed_forward(ps, a, keep, bank, valid, p, d)
        caches.length += 1
        return self._logits(final_hidden(ps, bank, valid, self.params.top, d))


def _kda_step(x: Tensor, p: Params, d: Dims, state: Tensor, conv: Tensor) -> Tensor:
    """One token per row through KDA; state and conv are updated in place."""
    *u, g, beta, gate = kda_project(x, p, d)
    sums: list[Tensor] = []
    for n, (name, new) in enumerate(zip("qkv", u, strict=True)):
        window = torch.cat((conv[n], new[:, None]), 1)  # [row, W, P]
        weight = p[f"self_attn.{name}_conv1d.weight"][:, 0].float()
        sums.append((window.float() * weight.T).sum(1))
        conv[n].copy_(window[:, 1:])
    q, k, v = (y.float() for y in kda_activate(*sums, d, x.dtype))
    state.mul_(g.exp()[:, :, None, :])
    update = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", state, k))
    state.add_(update[..., None] * k[:, :, None, :])
    o = torch.einsum("bhvk,bhk->bhv", state, q) * d.kda_dim**-0.5
    return kda_output(o.to(x.dtype), gate, p, d)


def _mla_step(x: Tensor, p: Params, d: Dims, latents: Tensor, length: Tensor) -> Tensor:
    """One token per row through absorbed MLA; appends its latent row."""
    q, latent, gate = mla_project(x, p, d)
    rows = torch.arange(len(x), device=x.device)
    latents[rows, length] = latent
    kv = p["self_attn.kv_b_proj.weight"].view(d.mla_heads, d.nope + d.v_dim, d.latent)
    absorbed = torch.einsum("bhn,hnc->bhc", q[..., : d.nope], kv[:, : d.nope])
    query = torch.cat((absorbed, q[..., d.nope :]), -1)
    score = torch.einsum("bhc,btc->bht", query, latents).float() * (d.nope + d.rope) ** -0.5
    hidden_keys = torch.arange(latents.shape[1], device=x.device)[None] > length[:, None]
    weight = torch.softmax(score.masked_fill(hidden_keys[:, None], float("-inf")), -1).to(x.dtype)
    z = torch.einsum("bht,btc->bhc", weight, latents[..., : d.latent])
    o = torch.einsum("bhc,hvc->bhv", z, kv[:, d.nope :])
    return mla_output(o.flatten(1), gate, p)


def _ablate(caches: Caches, ablation: Ablation) -> None:
    match ablation:
        case Ablation.NONE:
            pass
        case Ablation.LATENTS:
            for latent in caches.latents.values():
                latent.zero_()
        case Ablation.STATES:
            for tensor in (*caches.state.values(), *caches.conv.values()):
                tensor.zero_()
        case _:
            assert_never(ablation)


def _until(row: list[int], eos: int) -> list[int]:
    return row[: row.index(eos) + 1] if eos in row else row
