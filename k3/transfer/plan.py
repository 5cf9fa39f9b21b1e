"""Who sends which bytes to whom: the resharding formulas between a prefill and a decode instance.

Pure arithmetic on ranks, pages, heads and layers; addresses are added later by the mover. Both sides use it: prefill's
movers for their own share, decode's front for the senders each of its ranks has to hear from.

Letters: P = prefill tensor parallel size, D = ranks of one decode stage (tp * cp), c = decode cp, T = page tokens,
t = shard of a sender inside its stage (0..P-1), d = shard of a receiver inside its stage (0..D-1, cp minor).
Page b of a prompt belongs to the decode ranks with `d % c == b % c`, as number `b // c` of their own pages.
Latents are replicated over the P ranks of a stage, so their sending is split: sender of page b for receiver d is
`d % P` when P <= D, else `d + D * ((b // c) % (P // D))`. KDA states go by intersection of head ranges.
Draft rows go from prefill's last stage to decode's: whole to every rank from sender `d % P`, or by head ranges. Page b
lands in place `b % Q` of the slot's ring of Q places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, assert_never

from k3.cache.layout import DTYPE_BYTES, CacheLayout, Field, Placement, build_layout
from k3.errors import LayoutMismatch
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh


class Geometry(Protocol):
    """Sharding and sizes of one instance; the message `k3.v1.Geometry` is one."""

    @property
    def pp(self) -> int: ...  # noqa: D102
    @property
    def tp(self) -> int: ...  # noqa: D102
    @property
    def cp(self) -> int: ...  # noqa: D102
    @property
    def stage_bounds(self) -> Iterable[int]: ...  # noqa: D102
    @property
    def n_pages(self) -> int: ...  # noqa: D102
    @property
    def n_slots(self) -> int: ...  # noqa: D102
    @property
    def slot_columns(self) -> int: ...  # noqa: D102
    @property
    def draft_places(self) -> int: ...  # noqa: D102
    @property
    def draft_window(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Sharding:
    """A `Geometry` by value. stage_bounds: first layer of every stage, then the number of layers."""

    pp: int
    tp: int
    cp: int
    stage_bounds: tuple[int, ...]
    n_pages: int
    n_slots: int
    slot_columns: int
    draft_places: int = 0
    draft_window: int = 0

    @classmethod
    def of(cls, geometry: Geometry) -> Sharding:
        """Copy a geometry. Raises LayoutMismatch when it cannot be one."""
        g = geometry
        bounds = tuple(g.stage_bounds)
        rising = all(a < b for a, b in pairwise(bounds))
        sizes = (g.pp, g.tp, g.cp, g.n_pages, g.n_slots, g.slot_columns)
        if min(sizes) < 1 or len(bounds) != g.pp + 1 or bounds[0] != 0 or not rising:
            raise LayoutMismatch(
                f"geometry pp={g.pp} tp={g.tp} cp={g.cp} stage_bounds={list(bounds)} n_pages={g.n_pages} "
                f"n_slots={g.n_slots} slot_columns={g.slot_columns}: every size must be at least 1, and the "
                "bounds pp + 1 rising numbers from 0"
            )
        return cls(
            g.pp,
            g.tp,
            g.cp,
            bounds,
            *sizes[3:],
            draft_places=g.draft_places,
            draft_window=g.draft_window,
        )

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return self.tp * self.cp

    @property
    def size(self) -> int:
        """Ranks of the instance."""
        return self.pp * self.stage_size

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, shard) of a flat rank."""
        return divmod(rank, self.stage_size)

    def mesh(self) -> Mesh:
        """The mesh with exactly these stages."""
        bounds = self.stage_bounds
        counts = (b - a for a, b in pairwise(bounds))
        return Mesh(self.pp, self.tp, self.cp, tuple(counts))


def check_pair(spec: K3Spec, prefill: Geometry, decode: Geometry) -> None:
    """Raise LayoutMismatch unless every copy of the pair is whole pieces of heads and pages."""
    p, d = Sharding.of(prefill), Sharding.of(decode)
    if p.cp != 1:
        raise LayoutMismatch(f"prefill cp={p.cp}: prefill is never context parallel; set cp=1")
    for side, sharding in (("prefill", p), ("decode", d)):
        if sharding.stage_bounds[-1] != spec.num_layers:
            raise LayoutMismatch(
                f"{side} stage_bounds end at {sharding.stage_bounds[-1]}: the model has {spec.num_layers} layers"
            )
        if spec.kda_heads % sharding.stage_size:
            raise LayoutMismatch(
                f"{side} tp*cp={sharding.stage_size}: must divide the {spec.kda_heads} KDA heads"
            )
    if max(p.tp, d.stage_size) % min(p.tp, d.stage_size):
        raise LayoutMismatch(
            f"prefill tp={p.tp} and decode tp*cp={d.stage_size}: one must divide the other"
        )


def owned_pages(first: int, n: int, cp: int, rank: int) -> range:
    """Indices, among prompt pages first..first+n-1, of those that decode rank `rank` owns."""
    return range(first + (rank - first) % cp, first + n, cp)


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the pieces of one pool lie on both sides, relative to the pools' first bytes.

    Row r of unit u is `length` bytes at `source_offsets[r] + u * source_stride`, and likewise at the target. Its index
    in a prepared list is `r * units + u`.
    """

    pool: str
    length: int
    source_offsets: tuple[int, ...]
    source_stride: int
    source_units: int
    target_offsets: tuple[int, ...]
    target_stride: int
    target_units: int
    source_columns: int = 1
    target_columns: int = 1

    @property
    def unit_bytes(self) -> int:
        """Bytes that one page or one state sends."""
        return self.length * len(self.source_offsets)


@dataclass(frozen=True, slots=True)
class Pair:
    """One prefill and one decode instance that fit; senders and receivers are flat ranks."""

    spec: K3Spec
    prefill: Sharding
    decode: Sharding

    @classmethod
    def of(cls, spec: K3Spec, prefill: Geometry, decode: Geometry) -> Pair:
        """Check and build. Raises LayoutMismatch."""
        check_pair(spec, prefill, decode)
        return cls(spec, Sharding.of(prefill), Sharding.of(decode))

    def pages(self, sender: int, receiver: int, first: int, n: int) -> range:
        """Indices, among prompt pages first..first+n-1, of those whose latents `sender` writes to `receiver`."""
        (s, t), (e, d) = self.prefill.place(sender), self.decode.place(receiver)
        c, n_senders, n_receivers = self.decode.cp, self.prefill.tp, self.decode.stage_size
        if not self._has_common(s, e, is_mla=True):
            return range(0)
        if n_senders <= n_receivers:
            return owned_pages(first, n, c, d % c) if d % n_senders == t else range(0)
        if t % n_receivers != d:
            return range(0)
        m = n_senders // n_receivers
        return owned_pages(first, n, c * m, d % c + c * (t // n_receivers))

    def sends_state(self, sender: int, receiver: int) -> bool:
        """Whether `sender` holds KDA heads and layers of `receiver`."""
        (s, t), (e, d) = self.prefill.place(sender), self.decode.place(receiver)
        lo, hi = _common_heads(self.spec.kda_heads, t, self.prefill.tp, d, self.decode.stage_size)
        return lo < hi and self._has_common(s, e, is_mla=False)

    def sends_draft(self, sender: int, receiver: int, heads: int | None) -> bool:
        """Whether `sender` writes draft rows to `receiver`. heads: key heads, None = rows are replicated."""
        (s, t), (e, d) = self.prefill.place(sender), self.decode.place(receiver)
        is_last = s == self.prefill.pp - 1 and e == self.decode.pp - 1
        if not self.decode.draft_places or not is_last:
            return False
        if heads is None:
            return d % self.prefill.tp == t
        lo, hi = _common_heads(heads, t, self.prefill.tp, d, self.decode.stage_size)
        return lo < hi

    def draft_senders(self, receiver: int, heads: int | None) -> tuple[int, ...]:
        """Senders of draft rows that `receiver` hears from; may be empty."""
        ranks = range(self.prefill.size)
        return tuple(rank for rank in ranks if self.sends_draft(rank, receiver, heads))

    def draft_pages(self, prompt_len: int, page_tokens: int) -> range:
        """Pages of a prompt whose draft rows decode reads: those of the last `draft_window` positions."""
        oldest = max(0, prompt_len - self.decode.draft_window) // page_tokens
        return range(oldest, -(-prompt_len // page_tokens))

    def receivers(self, sender: int, n_pages: int) -> tuple[int, ...]:
        """Receivers that hear from `sender` when a prompt has `n_pages` pages."""
        return tuple(
            receiver
            for receiver in range(self.decode.size)
            if self.sends_state(sender, receiver) or self.pages(sender, receiver, 0, n_pages)
        )

    def senders(self, receiver: int, n_pages: int) -> tuple[int, ...]:
        """Senders that `receiver` hears from when a prompt has `n_pages` pages; may be empty."""
        return tuple(
            sender
            for sender in range(self.prefill.size)
            if self.sends_state(sender, receiver) or self.pages(sender, receiver, 0, n_pages)
        )

    def rows(self, source: CacheLayout, sender: int, receiver: int) -> tuple[Rows, ...]:
        """Pieces of every pool that `sender` (with layout `source`) can write to `receiver`.

        Pools without a common layer or head are left out.
        """
        stage, _shard = self.decode.place(receiver)
        target = build_layout(
            self.spec,
            self.decode.mesh(),
            stage,
            page_tokens=source.page_tokens,
            dtype=source.kv_dtype,
            columns=self.decode.slot_columns,
        )
        found: list[Rows] = []
        draft = source.field("draft")
        if draft is not None and self.sends_draft(sender, receiver, self._draft_heads(draft)):
            found.append(self._draft_rows(draft, sender, receiver))
        for mine in source.fields:
            theirs = target.field(mine.name)
            if theirs is None:
                continue
            rows = self._field_rows(mine, theirs, sender, receiver)
            if rows is not None:
                found.append(rows)
        return tuple(found)

    def _field_rows(self, mine: Field, theirs: Field, sender: int, receiver: int) -> Rows | None:
        match mine.placement:
            case Placement.OWNER:
                if not self.pages(sender, receiver, 0, self.prefill.tp * self.decode.stage_size):
                    return None
                return _page_rows(mine, theirs, self.prefill.n_pages, self.decode.n_pages)
            case Placement.HEAD_SHARD:
                if not self.sends_state(sender, receiver):
                    return None
                return self._head_rows(mine, theirs, sender, receiver)
            case Placement.REPLICATED:
                raise AssertionError(f"field {mine.name}: no rule moves replicated fields")
            case _:
                assert_never(mine.placement)

    def _draft_heads(self, mine: Field) -> int | None:
        """Key heads of the whole drafter, None where rows are replicated."""
        return None if mine.placement is Placement.REPLICATED else mine.shape[0] * self.prefill.tp

    def _draft_rows(self, mine: Field, sender: int, receiver: int) -> Rows:
        """One piece per page: whole, or the common heads."""
        (_s, t), (_e, d) = self.prefill.place(sender), self.decode.place(receiver)
        heads, n_receivers = self._draft_heads(mine), self.decode.stage_size
        source_offset = target_offset = 0
        length = target_bytes = mine.unit_bytes
        if heads is not None:
            lo, hi = _common_heads(heads, t, self.prefill.tp, d, n_receivers)
            head_bytes = _bytes(mine, mine.shape[1:])
            length, target_bytes = (hi - lo) * head_bytes, heads // n_receivers * head_bytes
            source_offset = (lo - t * mine.shape[0]) * head_bytes
            target_offset = lo * head_bytes - d * target_bytes
        return Rows(
            pool=mine.name,
            length=length,
            source_offsets=(source_offset,),
            source_stride=mine.unit_bytes,
            source_units=self.prefill.n_pages,
            target_offsets=(target_offset,),
            target_stride=target_bytes,
            target_units=self.decode.n_slots * self.decode.draft_places,
            target_columns=self.decode.draft_places,
        )

    def _head_rows(self, mine: Field, theirs: Field, sender: int, receiver: int) -> Rows:
        """Heads lo..hi-1: one piece when both sides hold the same layers, else one row per head."""
        (_s, t), (_e, d) = self.prefill.place(sender), self.decode.place(receiver)
        heads = self.spec.kda_heads
        lo, hi = _common_heads(heads, t, self.prefill.tp, d, self.decode.stage_size)
        mine_lo, theirs_lo = lo - t * mine.shape[0], lo - d * theirs.shape[0]
        n, f_s, f_d = _common_layers(mine, theirs)
        n_s, n_d = len(mine.layers), len(theirs.layers)
        head_bytes = _bytes(mine, mine.shape[2:])
        if n == n_s == n_d:
            length, starts = (hi - lo) * n * head_bytes, range(1)
        else:
            length, starts = n * head_bytes, range(hi - lo)
        return Rows(
            pool=mine.name,
            length=length,
            source_offsets=tuple(((mine_lo + h) * n_s + f_s) * head_bytes for h in starts),
            source_stride=mine.unit_bytes,
            source_units=self.prefill.n_slots * mine.columns,
            target_offsets=tuple(((theirs_lo + h) * n_d + f_d) * head_bytes for h in starts),
            target_stride=theirs.unit_bytes,
            target_units=self.decode.n_slots * theirs.columns,
            source_columns=mine.columns,
            target_columns=theirs.columns,
        )

    def _has_common(self, s: int, e: int, *, is_mla: bool) -> bool:
        """Whether prefill stage s and decode stage e share a layer of the kind."""
        p, d = self.prefill.stage_bounds, self.decode.stage_bounds
        shared = range(max(p[s], d[e]), min(p[s + 1], d[e + 1]))
        return any(self.spec.is_mla(layer) is is_mla for layer in shared)


def expected_senders(
    spec: K3Spec,
    prefill: Geometry,
    decode: Geometry,
    *,
    page_tokens: int,
    prompt_len: int,
    rank: int,
) -> tuple[int, ...]:
    """Flat prefill ranks that decode rank `rank` must hear from for a prompt of `prompt_len` tokens; may be empty."""
    return Pair.of(spec, prefill, decode).senders(rank, -(-prompt_len // page_tokens))


def _common_heads(heads: int, t: int, n_senders: int, d: int, n_receivers: int) -> tuple[int, int]:
    lo = max(t * heads // n_senders, d * heads // n_receivers)
    hi = min((t + 1) * heads // n_senders, (d + 1) * heads // n_receivers)
    return lo, hi


def _common_layers(mine: Field, theirs: Field) -> tuple[int, int, int]:
    """(number, first local index here, first local index there); both sides hold runs of one sequence."""
    common = [layer for layer in mine.layers if layer in theirs.layers]
    return len(common), mine.layers.index(common[0]), theirs.layers.index(common[0])


def _bytes(field: Field, shape: tuple[int, ...]) -> int:
    n = DTYPE_BYTES[field.dtype]
    for size in shape:
        n *= size
    return n


def _page_rows(mine: Field, theirs: Field, n_pages: int, peer_pages: int) -> Rows:
    """The common layers of a page are one run on both sides."""
    n, f_s, f_d = _common_layers(mine, theirs)
    layer_bytes = _bytes(mine, mine.shape[1:])
    return Rows(
        pool=mine.name,
        length=n * layer_bytes,
        source_offsets=(f_s * layer_bytes,),
        source_stride=mine.unit_bytes,
        source_units=n_pages,
        target_offsets=(f_d * layer_bytes,),
        target_stride=theirs.unit_bytes,
        target_units=peer_pages,
    )
