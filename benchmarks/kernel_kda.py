"""KDA between its projections: one decoded token, and verify of a group, beside flash-linear-attention.

Ours takes convolution inputs, raw gate and raw beta, and does convolution, normalisation, gate and recurrence. A verify
call is what a step costs: fold the accepted prefix of the last group (4 tokens) into the state, then the group. The
peer starts behind the convolution and, for verify, writes one state per token as its interface demands.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Row, Stopwatch, relative_error
from k3_kernels.reference import group as reference
from k3_kernels.reference import kda
from k3_kernels.reference.group import GroupCache, GroupRule
from k3_kernels.triton import kda_decode, kda_verify
from torch import Tensor

TITLE = "KDA decode and verify"
DIM, WIDTH, BOUND, EPS = 128, 4, -5.0, 1e-6
ACCEPTED = 4
PEER = "fla"
ERROR_LIMIT = 5e-3  # bfloat16 inputs are exact in the reference; ours stays in float32, the peer rounds its output


@dataclass(frozen=True, slots=True)
class KdaCase:
    """Heads of a rank, rows of a step, tokens of a group."""

    heads: int
    rows: int
    group: int

    @property
    def name(self) -> str:
        """As in the table."""
        what = "decode" if self.group == 1 else f"verify {self.group}, {ACCEPTED} accepted"
        return f"KDA {what}, {self.heads} heads x {self.rows}"

    @property
    def n_bytes(self) -> float:
        """State in and out, inputs, outputs; records in (accepted) and out."""
        per_head = 2 * 4 * DIM * DIM + self.group * (4 * DIM * 2 + DIM * 4)
        if self.group > 1:
            per_head += (ACCEPTED + self.group) * 3 * DIM * 4
        return self.heads * self.rows * per_head

    @property
    def n_flops(self) -> float:
        """Products on the state: two for each token and one for each folded record."""
        folded = ACCEPTED if self.group > 1 else 1
        return self.heads * self.rows * 2.0 * DIM * DIM * (2 * self.group + folded)


def cases() -> list[KdaCase]:
    """Full heads at a large batch, an eighth of them at a middle one."""
    return [KdaCase(96, 64, 1), KdaCase(12, 32, 1), KdaCase(96, 64, 8), KdaCase(12, 32, 8)]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random arguments of `reference.group.verify`."""

    u: Tensor
    raw: Tensor
    beta: Tensor
    rule: GroupRule
    cache: GroupCache
    slots: Tensor
    column: Tensor

    def copy(self, dtype: torch.dtype | None = None) -> Inputs:
        """Own caches; floating tensors in `dtype`."""

        def of(x: Tensor) -> Tensor:
            return x.clone() if dtype is None or not x.is_floating_point() else x.to(dtype)

        rule, cache = self.rule, self.cache
        return Inputs(
            of(self.u),
            of(self.raw),
            of(self.beta),
            GroupRule(
                of(rule.conv_HSDw), of(rule.bias_HD), of(rule.decay_H), rule.lower_bound, EPS
            ),
            GroupCache(
                of(cache.states),
                of(cache.windows),
                of(cache.tails),
                1,
                None if cache.records is None else of(cache.records),
            ),
            self.slots,
            self.column,
        )

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, GroupRule, GroupCache, Tensor]:
        """All but the read column."""
        return self.u, self.raw, self.beta, self.rule, self.cache, self.slots


def make(case: KdaCase, device: str = "cuda") -> Inputs:
    """Bfloat16 inputs and windows, float32 states; seed fixed."""
    torch.manual_seed(7)
    h, b, g = case.heads, case.rows, case.group

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    f32 = torch.float32
    records = None
    if g > 1:
        records = 0.1 * draw(b, h, 3, g, DIM, dtype=f32)
        records[:, :, 2] = -records[:, :, 2].abs()
    conv = 0.5 * draw(h, 3, WIDTH, DIM, dtype=f32).transpose(-1, -2)
    cache = GroupCache(
        0.3 * draw(b, h, DIM, DIM, dtype=f32),
        draw(b, h, 3, DIM, WIDTH - 1),
        draw(b, h, 3, g - 1, DIM),
        1,
        records,
    )
    rule = GroupRule(conv, draw(h, DIM, dtype=f32), draw(h, dtype=f32).exp(), BOUND, EPS)
    column = torch.full((b,), ACCEPTED - 1 if g > 1 else 0, device=device)
    slots = torch.randperm(b, device=device)
    return Inputs(
        draw(b, g, h, 3, DIM), draw(b, g, h, DIM), draw(b, g, h), rule, cache, slots, column
    )


def ours(case: KdaCase, inputs: Inputs, out: Tensor) -> Callable[[], None]:
    """The call to time; writes `out` [B, G, H, D]."""
    hopper = torch.cuda.get_device_capability()[0] == 9  # noqa: TID251
    if case.group == 1:
        u, raw, beta, rule, cache, slots = inputs.arguments()
        flat = (u[:, 0], raw[:, 0], beta[:, 0], rule, cache, slots, out[:, 0])
        return lambda: kda_decode.decode(*flat, hopper=hopper)
    arguments = (*inputs.arguments(), inputs.column, out)
    return lambda: kda_verify.verify(*arguments, hopper=hopper)


def expected(inputs: Inputs) -> tuple[Tensor, GroupCache]:
    """Float64 output and caches."""
    exact = inputs.copy(torch.float64)
    return reference.verify(*exact.arguments(), exact.column), exact.cache


def error(got: Tensor, cache: GroupCache, want: Tensor, exact: GroupCache) -> float:
    """The worst relative error of output, state, inputs kept and records."""
    worst = [relative_error(got, want), relative_error(cache.states, exact.states)]
    worst.append(relative_error(cache.windows, exact.windows))
    if cache.records is not None and exact.records is not None:
        worst.append(relative_error(cache.tails, exact.tails))
        worst.append(relative_error(cache.records, exact.records))
    return max(worst)


def run(case: KdaCase, wanted: Callable[[str], bool]) -> list[Row]:
    """Ours, then the peer with its state in both orders (the faster one is reported)."""
    watch = Stopwatch()
    inputs = make(case)
    want, exact = expected(inputs)
    mine = inputs.copy()
    out = torch.full(want.shape, float("nan"), device="cuda", dtype=torch.float32)
    call = ours(case, mine, out)
    call()
    wrong = error(out, mine.cache, want, exact)
    del want, exact
    what = "fold + verify, two launches" if case.group > 1 else "convolution and gate included"
    rows = [
        Row(
            case.name,
            "ours",
            wrong,
            ERROR_LIMIT,
            watch.time_us(call),
            case.n_bytes,
            case.n_flops,
            what,
        )
    ]
    if wanted(PEER) and not missing_peers():
        rows.append(
            min((_peer(case, inputs, watch, v) for v in (True, False)), key=lambda r: r.time_us)
        )
    return rows


def _peer(case: KdaCase, inputs: Inputs, watch: Stopwatch, v_first: bool) -> Row:
    """fla's fused recurrence from convolved bfloat16 q, k, v; per-token states for groups."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    b, g, h, _, d = inputs.u.shape
    y = torch.nn.functional.silu(inputs.u.float()).to(torch.bfloat16)
    q, k, v = (y[..., i, :].contiguous() for i in range(3))
    raw = inputs.raw.contiguous()
    rule = inputs.rule
    first = inputs.cache.states
    pool = torch.empty(b * g, h, d, d, device="cuda")
    pool[::g] = first if v_first else first.transpose(-1, -2)
    indices = torch.arange(b * g, device="cuda", dtype=torch.int32).view(b, g)
    if g > 1:  # the committed state is that of token 3
        pool[ACCEPTED - 1 :: g] = pool[::g]
    out = torch.empty(1, b * g, h, d, device="cuda", dtype=torch.bfloat16)
    flat = [x.view(1, b * g, h, -1) for x in (q, k, v, raw)]
    arguments = {
        "beta": inputs.beta.reshape(1, b * g, h).contiguous(),
        "A_log": rule.decay_H.log(),
        "dt_bias": rule.bias_HD.flatten().contiguous(),
        "initial_state": pool,
        "inplace_final_state": True,
        "state_v_first": v_first,
        "cu_seqlens": torch.arange(0, b * g + 1, g, device="cuda"),
        "ssm_state_indices": indices,
        "num_accepted_tokens": torch.full((b,), ACCEPTED, device="cuda", dtype=torch.int32)
        if g > 1
        else None,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": BOUND,
        "out": out,
    }

    def call() -> None:
        fused_recurrent_kda_fwd(*flat, **arguments)

    call()
    gate = kda.gate(raw.double() + rule.bias_HD.double(), rule.decay_H.double(), BOUND)
    qn, kn = (kda.l2_normalize(x.double(), EPS) for x in (q, k))
    state = first.double().clone()
    want = torch.empty(b, g, h, d, device="cuda", dtype=torch.float64)
    beta = torch.sigmoid(inputs.beta.double())
    for t in range(g):
        want[:, t] = kda.step(
            state, qn[:, t] * d**-0.5, kn[:, t], v[:, t].double(), gate[:, t], beta[:, t]
        )
    wrong = relative_error(out.view(b, g, h, d), want)
    order = "V-first" if v_first else "K-first"
    what = "state per token" if g > 1 else "without convolution"
    return Row(
        case.name,
        PEER,
        wrong,
        1e-2,
        watch.time_us(call),
        case.n_bytes,
        case.n_flops,
        f"{what}, {order}",
    )


def missing_peers() -> list[str]:
    """fla, when it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return ["fla: not installed (package fla-core)"]
    return []
