"""Floors of one decode step on a GPU: bytes over bandwidth or operations over throughput, whichever takes longer.

Closed forms of model, hardware and layout; nothing is measured. A group of `tp * cp` ranks splits everything over all
its ranks, except MLA attention: context parallel ranks hold 1 / cp of the keys and attend with all heads of their
tensor parallel slice, so they read fewer bytes for the same operations, replicate the query weights, and pay one
exchange per layer. cp = 1 is plain tensor parallelism. Calibrate `efficiency`, `link_bw` and `latency` on a machine.
Golden: helix/roofline.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3.model.spec import K3Spec, LayerKind

MXFP4_BYTES = 4.25 / 8  # 32 values share one scale byte
LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's device and link. Bytes and floating-point operations per second; latency of a collective, seconds."""

    mem_bw: float
    flops: float
    link_bw: float
    latency: float
    efficiency: float = 1.0
    memory_bytes: float = 0.0  # 0: unknown, any layout is taken to fit


PRESETS = {
    "h200_nvlink": Hardware(4.8e12, 989e12, 450e9, 6e-6, memory_bytes=141e9),
    "h200_ib": Hardware(4.8e12, 989e12, 50e9, 15e-6, memory_bytes=141e9),
    "gb300_nvl": Hardware(8.0e12, 2500e12, 900e9, 6e-6, memory_bytes=288e9),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the model of a step knows of a model; bytes are per value."""

    hidden: int
    heads: int
    q_lora: int
    latent: int
    pe: int
    nope: int
    v_head: int
    mla_layers: int
    kda_layers: int
    kda_heads: int
    kda_dim: int
    moe_layers: int
    experts: int
    top_k: int
    expert_hidden: int
    expert_inter: int
    shared_inter: int
    vocab: int
    weight_bytes: float
    expert_bytes: float
    kv_bytes: float

    @classmethod
    def of(cls, spec: K3Spec) -> Sizes:
        """A model in bfloat16, its experts in MXFP4 where the checkpoint has them so."""
        mla, kda, moe = spec.mla, spec.kda, spec.moe
        return cls(
            hidden=spec.hidden_size,
            heads=mla.n_heads,
            q_lora=mla.q_lora_rank or 0,
            latent=mla.kv_lora_rank,
            pe=mla.rope_dim,
            nope=mla.nope_dim,
            v_head=mla.v_dim,
            mla_layers=len(spec.layers_of(LayerKind.MLA)),
            kda_layers=len(spec.layers_of(LayerKind.KDA)),
            kda_heads=kda.n_heads,
            kda_dim=kda.head_dim,
            moe_layers=sum(map(spec.is_moe, range(spec.num_layers))),
            experts=moe.n_experts,
            top_k=moe.top_k,
            expert_hidden=moe.expert_in(spec.hidden_size),
            expert_inter=moe.width,
            shared_inter=moe.shared_width,
            vocab=spec.vocab_size,
            weight_bytes=2.0,
            expert_bytes=MXFP4_BYTES if spec.mxfp4_experts else 2.0,
            kv_bytes=2.0,
        )

    @property
    def row(self) -> int:
        """Values of one cached token and layer."""
        return self.latent + self.pe

    @property
    def query_up(self) -> int:
        """Parameters of the query and key up-projections of one MLA layer, all heads."""
        source = self.q_lora or self.hidden
        return source * self.heads * (self.nope + self.pe) + self.heads * self.nope * self.latent

    @property
    def value_up(self) -> int:
        """Parameters of the value up-projection of one MLA layer, all heads."""
        return self.heads * self.v_head * self.latent

    @property
    def down(self) -> int:
        """Parameters of the down-projections of one MLA layer; every rank has them."""
        return self.hidden * (self.q_lora + self.row)

    @property
    def gate_and_out(self) -> int:
        """Parameters of output gate and output projection of one MLA layer."""
        return 2 * self.hidden * self.heads * self.v_head

    @property
    def kda(self) -> int:
        """Parameters of one KDA layer."""
        width = self.kda_heads * self.kda_dim
        decay = self.hidden * self.kda_dim + self.kda_dim * width
        return 5 * self.hidden * width + decay + self.hidden * self.kda_heads

    @property
    def expert(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.expert_hidden * self.expert_inter

    @property
    def shared(self) -> int:
        """Parameters of the shared experts and the latent projections of one MoE layer."""
        return 3 * self.hidden * self.shared_inter + 2 * self.hidden * self.expert_hidden

    @property
    def state_bytes(self) -> int:
        """Recurrent state (float32) and convolution windows of one request and layer, all heads."""
        width = self.kda_heads * self.kda_dim
        return width * self.kda_dim * 4 + 3 * width * 3 * 2


@dataclass(frozen=True, slots=True)
class Layout:
    """How a decode group is spread. exchange: `value`, `latent` or `gather`, what cp ranks send each other."""

    tp: int = 1
    cp: int = 1
    exchange: str = "value"
    page_tokens: int = 64

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.tp * self.cp

    @property
    def gathers(self) -> bool:
        """Whether every rank gets all values and holds gate and output projection of MLA layers whole."""
        return self.cp > 1 and self.exchange == "gather"

    def local_len(self, n: int) -> int:
        """Tokens that the fullest rank holds of `n`."""
        full, rest = divmod(n, self.page_tokens * self.cp)
        return full * self.page_tokens + min(rest, self.page_tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """What a step works on: rows, tokens of context per row, drafts per row."""

    batch: int
    context: int
    draft_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * (self.draft_tokens + 1)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step by part, and what the attention costs. Bytes are of one rank."""

    mla_weights: float
    mla_attention: float
    mla_all_to_all: float
    kda: float
    moe: float
    all_reduce: float
    lm_head: float
    attention_bound_by: str
    kv_bytes_per_rank: float
    a2a_bytes_per_rank_per_layer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        mla = self.mla_weights + self.mla_attention + self.mla_all_to_all
        return mla + self.kda + self.moe + self.all_reduce + self.lm_head


def step_cost(m: Sizes, hw: Hardware, layout: Layout, load: Load) -> StepCost:
    """The floor of one step; see the module's docstring."""
    n, t, w = layout.ranks, load.tokens, m.weight_bytes
    bw, fl = hw.mem_bw * hw.efficiency, hw.flops * hw.efficiency

    def floor(n_bytes: float, n_ops: float) -> float:
        return max(n_bytes / bw, n_ops / fl)

    mla = _mla_parameters(m, layout)
    local, heads = layout.local_len(load.context), m.heads / layout.tp
    kv_bytes = load.batch * local * m.row * m.kv_bytes
    attention_ops = 2 * t * local * heads * (m.row + m.latent)
    sent = _exchange_bytes(m, layout, t)
    all_to_all = sent / hw.link_bw + hw.latency if layout.cp > 1 else 0.0
    reduced = 2 * (n - 1) / n * t * m.hidden * 2
    all_reduce = reduced / hw.link_bw + hw.latency if n > 1 else 0.0
    state = 2 * load.batch * m.kda_heads * m.kda_dim**2 * 4
    touched = m.experts * (1 - (1 - m.top_k / m.experts) ** t)  # distinct experts
    expert_bytes = (touched * m.expert * m.expert_bytes + m.shared * w) / n
    reductions = m.kda_layers + m.moe_layers + (0 if layout.gathers else m.mla_layers)
    return StepCost(
        mla_weights=m.mla_layers * floor(mla * w, 2 * t * mla),
        mla_attention=m.mla_layers * floor(kv_bytes, attention_ops),
        mla_all_to_all=m.mla_layers * all_to_all,
        kda=m.kda_layers * floor((m.kda * w + state) / n, 2 * t * m.kda / n),
        moe=m.moe_layers
        * floor(
            expert_bytes + m.hidden * m.experts * w,
            2 * t * (m.top_k * m.expert + m.shared) / n,
        ),
        all_reduce=reductions * all_reduce,
        lm_head=m.hidden * m.vocab / n * w / bw,
        attention_bound_by="memory" if kv_bytes / bw >= attention_ops / fl else "compute",
        kv_bytes_per_rank=m.mla_layers * kv_bytes,
        a2a_bytes_per_rank_per_layer=sent,
    )


def weight_bytes(m: Sizes, layout: Layout) -> float:
    """Bytes of weights one rank holds; the few dense layers count as MoE layers without routed experts."""
    n, w = layout.ranks, m.weight_bytes
    layers = m.mla_layers + m.kda_layers
    experts = m.moe_layers * m.experts * m.expert * m.expert_bytes / n
    router = m.moe_layers * m.hidden * m.experts * w
    rest = layers * m.shared + m.kda_layers * m.kda + 2 * m.hidden * m.vocab
    return experts + router + rest * w / n + m.mla_layers * _mla_parameters(m, layout) * w


def capacity(m: Sizes, hw: Hardware, layout: Layout, batch: int) -> int:
    """Tokens of context the group holds beside weights and `batch` + 1 states; negative when they do not fit."""
    state = (batch + 1) * m.kda_layers * m.state_bytes / layout.ranks
    left = hw.memory_bytes - weight_bytes(m, layout) - state
    page_bytes = m.mla_layers * layout.page_tokens * m.row * m.kv_bytes
    return int(left // page_bytes) * layout.page_tokens * layout.cp


def break_even(
    m: Sizes, hw: Hardware, layout: Layout, load: Load, limit: int = 1 << 24
) -> int | None:
    """Context per row, to a page, from which `layout` beats plain tensor parallelism; None: not up to `limit`."""
    plain = Layout(layout.ranks, 1, layout.exchange, layout.page_tokens)

    def is_faster(context: int) -> bool:
        at = Load(load.batch, context, load.draft_tokens)
        return step_cost(m, hw, layout, at).total < step_cost(m, hw, plain, at).total

    if not is_faster(limit):
        return None
    low, high = 0, limit
    while high - low > layout.page_tokens:
        middle = (low + high) // 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return high


def _mla_parameters(m: Sizes, layout: Layout) -> float:
    """Parameters of one MLA layer that a rank holds and reads."""
    n, tp = layout.ranks, layout.tp
    value_shards = n if layout.cp == 1 or layout.exchange == "latent" else tp
    out_shards = 1 if layout.gathers else n
    return m.down + m.query_up / tp + m.value_up / value_shards + m.gate_and_out / out_shards


def _exchange_bytes(m: Sizes, layout: Layout, tokens: int) -> float:
    """What a rank sends per MLA layer: outputs in two bytes and log-sum-exps, by head to its owner or all to all."""
    width = m.latent if layout.exchange == "latent" else m.v_head
    others = layout.ranks - 1 if layout.gathers else (layout.cp - 1) / layout.cp
    return tokens * m.heads / layout.tp * others * (2 * width + LSE_BYTES)
