"""The frame: what crosses a pipeline stage boundary, and the residual stream while a stage works on it.

One contiguous tensor `[T, units, H]`, units in this order: the running residual of the open block
(all pending outputs already added), the bank of finished residual blocks (oldest first), the relayed
taps (ascending layer id). Widths follow from the partition, the block size and the tap list, so no
shape is exchanged at run time; a header in front of the same message lets the receiver check all of it.
A stage allocates its outgoing frame as a local of the step, works inside it, and hands it to the
send, which keeps it alive. Nothing survives a step.

Letters: T tokens, U units, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3.errors import GroupFailed, ModelError
from k3.model.spec import K3Spec
from k3.parallel.collectives import Collectives, Pending

MAGIC = 0x4B33_4652_414D_4531  # "K3FRAME1"
HEADER_FIELDS = 8  # magic, step, T, hidden units, bank units, tap units, H, reserved
HEADER_BYTES = HEADER_FIELDS * 8
EMBEDDING_TAP = -1


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Units of a frame entering layer `next_layer` (num_layers: leaving the last stage)."""

    hidden_size: int
    bank: int
    taps: tuple[int, ...]

    @property
    def units(self) -> int:
        """Widths of H per token."""
        return 1 + self.bank + len(self.taps)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Refuse a drafter's tap list that cannot be captured. Raises ModelError, `code` as in the golden table."""
    if not taps:
        raise ModelError(
            "target_layer_ids is empty: a drafter reads at least one layer", code="AUX_TAPS_EMPTY"
        )
    if len(set(taps)) != len(taps):
        raise ModelError(
            f"target_layer_ids {list(taps)}: each tap may be listed once",
            code="AUX_TAPS_DUPLICATE",
        )
    outside = [tap for tap in taps if not EMBEDDING_TAP <= tap < num_layers]
    if outside:
        raise ModelError(
            f"target_layer_ids {outside}: expected -1 (embedding) or 0..{num_layers - 1}",
            code="AUX_TAPS_RANGE",
        )


def frame_layout(
    spec: K3Spec, next_layer: int, taps: tuple[int, ...], tap_stream: str = "prefix"
) -> FrameLayout:
    """The frame that enters `next_layer`, carrying the taps captured before it.

    taps: layer ids (-1: embedding) in any order; the frame holds them ascending.
    tap_stream: `prefix`: tap i is the residual after layer i; `mixture`: what layer i + 1 reads, so
      it is captured one layer later (after the last layer: by the last stage).
    """
    if tap_stream not in ("prefix", "mixture"):
        raise ModelError(f"tap_stream={tap_stream!r}: expected prefix or mixture")
    if taps:
        check_taps(taps, spec.num_layers)
    late = tap_stream == "mixture" and next_layer < spec.num_layers
    captured = (t for t in sorted(taps) if (0 if t == EMBEDDING_TAP else t + late) < next_layer)
    return FrameLayout(spec.hidden_size, spec.bank_depth(next_layer), tuple(captured))


@dataclass(frozen=True, slots=True)
class Frame:
    """`message` is header then data; `data_TUH` a view into it."""

    layout: FrameLayout
    message: Tensor
    data_TUH: Tensor

    @classmethod
    def empty(
        cls, layout: FrameLayout, n_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Frame:
        """An uninitialised frame of `n_tokens`."""
        n_values = n_tokens * layout.units * layout.hidden_size
        message = torch.empty(
            HEADER_BYTES + n_values * dtype.itemsize, dtype=torch.uint8, device=device
        )
        data = message[HEADER_BYTES:].view(dtype).view(n_tokens, layout.units, layout.hidden_size)
        return cls(layout, message, data)

    @property
    def n_tokens(self) -> int:
        """T."""
        return self.data_TUH.shape[0]

    @property
    def hidden_TH(self) -> Tensor:
        """Running residual (prefix sum) of the open block; a view."""
        return self.data_TUH[:, 0]

    @property
    def taps_TXH(self) -> Tensor:
        """Captured taps, ascending id; a view."""
        return self.data_TUH[:, 1 + self.layout.bank :]

    def candidates_TJH(self, n_blocks: int) -> Tensor:
        """Residual and the first `n_blocks` banked blocks: what a mixing site chooses from; a view."""
        return self.data_TUH[:, : 1 + n_blocks]

    def bank_TH(self, block: int) -> Tensor:
        """One banked block; a view."""
        return self.data_TUH[:, 1 + block]

    def tap_TH(self, tap: int) -> Tensor:
        """Column of tap id `tap`; a view."""
        return self.data_TUH[:, 1 + self.layout.bank + self.layout.taps.index(tap)]

    def take_over(self, incoming: Frame) -> None:
        """Copy residual, bank and taps of the frame received from the stage before."""
        self.data_TUH[:, : 1 + incoming.layout.bank].copy_(
            incoming.data_TUH[:, : 1 + incoming.layout.bank]
        )
        n_taps = len(incoming.layout.taps)
        if incoming.layout.taps != self.layout.taps[:n_taps]:
            raise GroupFailed(
                f"FRAME_WIDTH: received taps {incoming.layout.taps}, expected the leading ones of "
                f"{self.layout.taps}; all stages need the same tap list"
            )
        self.taps_TXH[:, :n_taps].copy_(incoming.taps_TXH)


def _header(layout: FrameLayout, n_tokens: int, step_id: int) -> list[int]:
    return [MAGIC, step_id, n_tokens, 1, layout.bank, len(layout.taps), layout.hidden_size, 0]


def send_frame(comm: Collectives, frame: Frame, step_id: int, to: int) -> Pending:
    """Start sending `frame`; the result keeps it alive until waited for."""
    header = torch.tensor(_header(frame.layout, frame.n_tokens, step_id), dtype=torch.int64)
    frame.message[:HEADER_BYTES].copy_(header.view(torch.uint8))
    return comm.send(frame.message, to)


def receive_frame(
    comm: Collectives,
    layout: FrameLayout,
    n_tokens: int,
    step_id: int,
    source: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Frame:
    """Receive the frame of plan `step_id`. Raises GroupFailed when its header is another frame's."""
    frame = Frame.empty(layout, n_tokens, dtype, device)
    comm.recv(frame.message, source)
    got = frame.message[:HEADER_BYTES].cpu().view(torch.int64).tolist()
    expected = _header(layout, n_tokens, step_id)
    if got != expected:
        names = ("magic", "step_id", "tokens", "hidden", "bank", "taps", "hidden_size", "reserved")
        wrong = ", ".join(
            f"{name} {g} instead of {e}"
            for name, g, e in zip(names, got, expected, strict=True)
            if g != e
        )
        raise GroupFailed(
            f"FRAME_WIDTH: frame from rank {source} has {wrong} (expected {layout.units} units of "
            f"{layout.hidden_size}); stages disagree about plan, partition or tap list"
        )
    return frame
