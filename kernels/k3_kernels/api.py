"""The operations the model calls, and `select`, which chooses their implementations once.

`Ops` bundles four groups behind protocols; every backend offers the same signatures as the torch
reference, which is always available and runs on any device. An unknown or unavailable backend is
refused here with the remedy; nothing falls back silently.
`capturable` says whether a verify step with these ops may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3_kernels.cpu import library
from k3_kernels.reference import attnres, kda, message, mla, moe, norm, replay
from k3_kernels.reference.group import ChunkSpan, GroupCache, GroupRule, chunks
from k3_kernels.reference.group import verify as verify_group
from k3_kernels.reference.moe import ExpertWeights, Routing

Projection = Callable[[Tensor], Tensor]


class BackendError(ValueError):
    """A backend name that does not exist, or that cannot run here. The message says what to set."""


@dataclass(frozen=True, slots=True)
class Backends:
    """Implementation names as configured; `auto` is the best one for the device."""

    attention: str = "auto"
    kda: str = "auto"
    moe: str = "auto"


class DenseOps(Protocol):
    """What surrounds the other groups: projections, norms and activations. Rules: `k3_kernels.reference.norm`."""

    def projection(self, weight_OI: Tensor) -> Projection:
        """At load: x [.., I] -> x weight^T [.., O], in the weight's dtype."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last axis; in the weight's dtype, to which x is rounded first."""
        ...

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm(x) weight sigmoid(gate), in the gate's dtype."""
        ...

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x sigmoid(gate)."""
        ...

    def situ(self, gate_up_TF: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        """SiTU of a joint gate and up projection [T, 2F]: [T, F]."""
        ...


class AttentionOps(Protocol):
    """Latent attention. Shapes and rules: `k3_kernels.reference.mla`.

    A plan is opaque: only the operations that made it read it.
    """

    def write(self, cache_PTK: Tensor, slot_T: Tensor, latent_TK: Tensor) -> None:
        """Store latent rows; slot -1 is skipped."""
        ...

    def plan(
        self, page_table_BW: Tensor, bound_T: Tensor, group: int, max_bound: int, page_tokens: int
    ) -> Any:
        """Once per step, before any layer."""
        ...

    def decode(
        self, q_THK: Tensor, cache_PTK: Tensor, plan: Any, scale: float, value_width: int
    ) -> tuple[Tensor, Tensor]:
        """Absorbed attention of verify groups: o [T, H, C], lse [T, H] natural log."""
        ...

    def prefill(
        self,
        q_THD: Tensor,
        cache_PTK: Tensor,
        page_table_RW: Tensor,
        cu_lens: tuple[int, ...],
        starts: tuple[int, ...],
        kv_up_HDC: Tensor,
        scale: float,
    ) -> Tensor:
        """Expanded causal attention over cached latents and the chunk: o [T, H, V]."""
        ...

    def pack(
        self, o_THC: Tensor, lse_TH: Tensor, value_up_HCV: Tensor | None, n_messages: int = 1
    ) -> Tensor:
        """What a context rank sends to each of `n_messages`, [R, T, H / R, bytes]. Rules: `reference.message`."""
        ...

    def merge_packed(self, message_RTHb: Tensor, dtype: torch.dtype) -> Tensor:
        """Union of the partial results of several messages: o [T, H, X]."""
        ...


class KdaOps(Protocol):
    """A KDA layer between its projections: convolution, normalisation, gate, delta rule. Shapes: `reference.group`."""

    def chunks(
        self,
        u_THSD: Tensor,
        raw_THD: Tensor,
        beta_TH: Tensor,
        rule: GroupRule,
        cache: GroupCache,
        spans: Sequence[ChunkSpan],
    ) -> Tensor:
        """Prefill chunks of several requests to o [T, H, D]: `reference.group.chunks`."""
        ...

    def group(
        self,
        u_BGHSD: Tensor,
        raw_BGHD: Tensor,
        beta_BGH: Tensor,
        rule: GroupRule,
        cache: GroupCache,
        slots_B: Tensor,
        read_column_B: Tensor,
    ) -> Tensor:
        """Verify groups from convolution inputs, raw gate and raw beta to o [B, G, H, D]: `reference.group.verify`."""
        ...

    def require(self, head_dim: int, conv_width: int, dtype: torch.dtype) -> None:
        """At load. Raises BackendError when heads of this kind cannot be computed."""
        ...


class MoeOps(Protocol):
    """Expert choice and experts. Shapes and rules: `k3_kernels.reference.moe`."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """At load: the form that `experts` of this backend reads."""
        ...

    def require(self, dtype: torch.dtype) -> None:
        """At load. Raises BackendError when experts of this activation dtype cannot be computed."""
        ...

    def route(
        self, x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, rule: Routing
    ) -> tuple[Tensor, Tensor]:
        """Expert ids and weights."""
        ...

    def experts(
        self,
        z_TZ: Tensor,
        ids_Tk: Tensor,
        weight_Tk: Tensor,
        weights: ExpertWeights,
        beta: float,
        linear_beta: float | None,
    ) -> Tensor:
        """Weighted sum of the experts held here."""
        ...


class MixOp(Protocol):
    """The attention-residual mixing site. Rules: `k3_kernels.reference.attnres`."""

    def __call__(self, candidates_TJH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Softmax mixture of the candidates."""
        ...


class ReadOp(Protocol):
    """All that lies between two sublayers, in one operation. Rules: `k3_kernels.reference.attnres.read`."""

    def __call__(
        self,
        candidates_TJH: Tensor,
        outputs: tuple[Tensor, ...],
        score_H: Tensor | None,
        norm_H: Tensor,
        eps: float,
    ) -> Tensor:
        """Outputs to the residual (in place), mixture of the candidates, norm: [T, H]."""
        ...


class ReferenceDense:
    """Torch reference; any device, any float dtype."""

    rms_norm = staticmethod(norm.rms_norm)
    gated_rms_norm = staticmethod(norm.gated_rms_norm)

    def projection(self, weight_OI: Tensor) -> Projection:
        """Torch's own product."""
        return partial(linear, weight=weight_OI)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """In x's dtype throughout."""
        return x * torch.sigmoid(gate)

    def situ(self, gate_up_TF: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        """Halves, then `reference.norm.situ`."""
        gate, up = gate_up_TF.chunk(2, -1)
        return norm.situ(gate, up, beta, linear_beta)


class ReferenceAttention:
    """Torch reference; any device, any float dtype."""

    write = staticmethod(mla.write)
    plan = staticmethod(mla.plan_decode)
    decode = staticmethod(mla.decode)
    prefill = staticmethod(mla.prefill)
    pack = staticmethod(message.pack)
    merge_packed = staticmethod(message.merge_packed)


class ReferenceKda:
    """Torch reference: tiles for chunks, token by token for verify."""

    chunks = staticmethod(chunks)
    group = staticmethod(verify_group)

    def require(self, head_dim: int, conv_width: int, dtype: torch.dtype) -> None:
        """Everything can be computed."""

    def verify(
        self,
        q_BGHD: Tensor,
        k_BGHD: Tensor,
        v_BGHD: Tensor,
        g_BGHD: Tensor,
        beta_BGH: Tensor,
        states: Tensor,
        slots_B: Tensor,
        read_column_B: Tensor,
        columns: int,
        records: Tensor | None = None,
    ) -> Tensor:
        """Snapshots without records, replay with them."""
        tokens = (q_BGHD, k_BGHD, v_BGHD, g_BGHD, beta_BGH)
        if records is None:
            return kda.verify(*tokens, states, slots_B, read_column_B, columns)
        assert columns == 1, f"columns={columns}: a slot with records holds one state"
        return replay.verify(*tokens, states, records, slots_B, read_column_B)


class ReferenceMoe:
    """Torch reference: tokens grouped by expert."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """As they are."""
        return weights

    route = staticmethod(moe.route)
    experts = staticmethod(moe.experts)

    def require(self, dtype: torch.dtype) -> None:
        """Everything can be computed."""


@dataclass(frozen=True, slots=True)
class Ops:
    """Everything chosen, by concrete name in `chosen`. read: None where its parts are operations of their own."""

    dense: DenseOps
    attention: AttentionOps
    kda: KdaOps
    moe: MoeOps
    mix: MixOp
    read: ReadOp | None
    chosen: Backends
    capturable: bool


CAPTURABLE = ("triton", "triton+flashmla", "flashmla")  # attention without a host read in a step
IMPLEMENTED = ("native", "reference")


def _choose(part: str, name: str, device: torch.device) -> str:
    """`native` is what `auto` means on a CPU where the library was built."""
    if name == "auto":
        return "native" if device.type == "cpu" and library.is_built() else "reference"
    if name not in IMPLEMENTED:
        raise BackendError(
            f"backends.{part}={name!r}: not available; available: {', '.join(IMPLEMENTED)}; set "
            f"backends.{part}=auto"
        )
    if name == "native" and device.type != "cpu":
        raise BackendError(
            f"backends.{part}='native' runs on CPUs, not on {device.type}; set backends.{part}=auto"
        )
    return name


def _attention(name: str, device: torch.device) -> tuple[str, AttentionOps]:
    if device.type == "cuda" and name != "reference":
        from k3_kernels.backends.choice import cuda_attention

        return cuda_attention(name, device)
    name = _choose("attention", name, device)
    if name == "native":
        from k3_kernels.cpu.attention import NativeAttention

        return name, NativeAttention()
    return name, ReferenceAttention()


def _kda(name: str, device: torch.device) -> tuple[str, KdaOps]:
    if device.type == "cuda" and name != "reference":
        from k3_kernels.backends.choice import cuda_kda

        return cuda_kda(name, device)
    name = _choose("kda", name, device)
    if name == "native":
        from k3_kernels.cpu.ops import NativeKda

        return name, NativeKda()
    return name, ReferenceKda()


def _moe(name: str, device: torch.device) -> tuple[str, MoeOps]:
    if device.type == "cuda" and name != "reference":
        from k3_kernels.backends.choice import cuda_moe

        return cuda_moe(name, device)
    name = _choose("moe", name, device)
    if name == "native":
        from k3_kernels.cpu.moe_ops import NativeMoe

        return name, NativeMoe()
    return name, ReferenceMoe()


def _mix(kda_name: str) -> tuple[MixOp, ReadOp | None]:
    """Mixing has no name of its own: it is by the same kernels as KDA."""
    if kda_name == "reference":
        return attnres.mix, None
    if kda_name == "native":
        from k3_kernels.cpu.ops import NativeMix

        return NativeMix(), None
    from k3_kernels.triton.attnres import mix, read

    return mix, read


def _dense(kda_name: str) -> DenseOps:
    """Like mixing, by the same kernels as KDA."""
    if kda_name == "native":
        from k3_kernels.cpu.draft_ops import NativeDraft

        return NativeDraft()
    if kda_name != "triton":
        return ReferenceDense()
    from k3_kernels.triton.dense_ops import TritonDense

    return TritonDense()


def select(backends: Backends, device: torch.device) -> Ops:
    """Choose implementations for `device`, once per process. Raises BackendError."""
    try:
        return _select(backends, device)
    except library.LibraryError as error:
        raise BackendError(f"native backend: {error}; or set backends to reference") from error


def _select(backends: Backends, device: torch.device) -> Ops:
    attention_name, attention = _attention(backends.attention, device)
    kda_name, kda_ops = _kda(backends.kda, device)
    moe_name, moe_ops = _moe(backends.moe, device)
    chosen = Backends(attention_name, kda_name, moe_name)
    mix, read = _mix(kda_name)
    return Ops(
        dense=_dense(kda_name),
        attention=attention,
        kda=kda_ops,
        moe=moe_ops,
        mix=mix,
        read=read,
        chosen=chosen,
        capturable=attention_name in CAPTURABLE and kda_name == moe_name == "triton",
    )
