"""What the caches of one rank consist of: fields, their shapes, and the fingerprints two sides compare.

A `Field` is one contiguous tensor `[units, *shape]`, registered whole with the transfer library. A unit is a page
(`page_tokens` tokens of all local layers together) or a pool slot (one request's recurrent state of all local
layers). Everything one request moves lies together, so one page or one head range is one descriptor.

| field  | unit | shape of a unit                                  | placement    | sent |
|--------|------|--------------------------------------------------|--------------|------|
| latent | page | [mla_layers, page_tokens, kv_lora_rank + rope]   | owner        | yes  |
| kda    | slot | [heads, kda_layers, v_dim, k_dim] (V-first)      | head_shard   | yes  |
| conv   | slot | [heads, kda_layers, 3 (q, k, v), dim, width - 1] | head_shard   | yes  |
| draft  | page | `DraftSpec.place_shape`, last stage              | replicated or head_shard | yes |

At decode a unit of `draft` is one page place of a slot's ring: `columns` of them belong to a slot. A decode instance
that finds prompts in a cache of its own keeps the rows in pages as well (field `context`, shaped like `draft`, never
sent); its rings belong to rows of the batch, since checkpoints need none. What takes a verify group back (`Rollback`)
lies beside the fields and is never sent either.

Pure arithmetic: no torch. `k3/cache/storage.py` allocates, `k3/transfer/plan.py` computes copies.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from math import prod

from k3.errors import ConfigError
from k3.model.digest import model_id
from k3.model.dspark_spec import DraftSpec
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
PROTO_VERSION = 1
DRAFT_ROWS = ("draft", "context")


class Unit(Enum):
    """What one row of a field belongs to."""

    PAGE = "page"
    SLOT = "slot"
    RING = "ring"


class Placement(Enum):
    """How a field is spread over the ranks of one stage."""

    OWNER = "owner"  # pages live on the context-parallel rank that owns them
    HEAD_SHARD = "head_shard"  # every rank holds a range of heads
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Field:
    """One registered tensor `[units * columns, *shape]`.

    `columns` pool slots belong to one state slot (k + 1 with snapshots); a transfer addresses column 0.
    `layers` are global layer indices in order of the layer axis.
    """

    name: str
    unit: Unit
    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    layers: tuple[int, ...]
    columns: int = 1

    @property
    def unit_bytes(self) -> int:
        """Bytes of one page or one pool slot."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Rollback:
    """What a state slot of one rank keeps beside its fields so that any prefix of a verify group can be the real one.

    group: tokens of a verify group. Snapshots keep `group` columns of the `kda` field; replay keeps one column and
    `records` = group records of key, delta and log decay. Either way the inputs of the group's tokens extend the
    convolution window by group - 1.
    """

    heads: int
    layers: int
    head_dim: int
    group: int = 1
    records: int = 0
    record_dtype: str = "float32"
    tail_dtype: str = "float32"

    @property
    def tail_shape(self) -> tuple[int, ...]:
        """Of one layer."""
        return (self.heads, 3, self.group - 1, self.head_dim)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Of one layer: 3 are k, u, g."""
        return (self.heads, 3, self.records, self.head_dim)

    @property
    def slot_bytes(self) -> int:
        """Of all layers."""
        tails = prod(self.tail_shape) * DTYPE_BYTES[self.tail_dtype]
        records = prod(self.record_shape) * DTYPE_BYTES[self.record_dtype]
        return self.layers * (tails + records)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All fields of one rank, and the numbers a peer must share.

    A stage without a layer kind has no field of it; ids of pages and slots mean the same on every rank.
    """

    page_tokens: int
    kv_dtype: str
    state_dtype: str
    conv_dtype: str
    latent_dim: int
    kda_heads: int
    head_dim: int
    conv_width: int
    fields: tuple[Field, ...]
    rollback: Rollback

    def field(self, name: str) -> Field | None:
        """The field called `name`, or None when this stage has no such layers."""
        return next((f for f in self.fields if f.name == name), None)

    @property
    def page_bytes(self) -> int:
        """Bytes one page costs on this rank."""
        return sum(f.unit_bytes for f in self.fields if f.unit is Unit.PAGE)

    @property
    def slot_bytes(self) -> int:
        """Bytes one state slot costs on this rank."""
        fields = sum(f.unit_bytes * f.columns for f in self.fields if f.unit is Unit.SLOT)
        return fields + self.rollback.slot_bytes

    @property
    def ring_bytes(self) -> int:
        """Bytes one draft ring that belongs to a row costs on this rank."""
        return sum(f.unit_bytes * f.columns for f in self.fields if f.unit is Unit.RING)

    def pages_for(self, memory_bytes: int, n_slots: int, n_rings: int = 0) -> int:
        """Pages that fit beside `n_slots` state slots and `n_rings` rings of rows; 0 or less when those do not fit.

        A rank without page fields can number any page, so it never limits the group.
        """
        if self.page_bytes == 0:
            return 1 << 30
        return (memory_bytes - self.total_bytes(0, n_slots, n_rings)) // self.page_bytes

    def total_bytes(self, n_pages: int, n_slots: int, n_rings: int = 0) -> int:
        """Bytes of all pools of this rank."""
        return n_pages * self.page_bytes + n_slots * self.slot_bytes + n_rings * self.ring_bytes


def build_layout(
    spec: K3Spec,
    mesh: Mesh,
    stage: int,
    *,
    page_tokens: int,
    dtype: str,
    columns: int = 1,
    records: int = 0,
    draft: DraftSpec | None = None,
    draft_places: int = 0,
    keeps_context: bool = False,
) -> CacheLayout:
    """Fields of a rank on `stage`.

    dtype: the model's dtype; the recurrent state is float32, or float64 when the model is float64.
    columns: pool slots per state slot (1, or k + 1 for snapshots of a verify group).
    records: tokens of a verify group whose records are kept instead (replay: k + 1); then columns must be 1.
    draft: the drafter whose rows are kept; draft_places: page places of each slot's ring, 0 = rows lie in pages.
    keeps_context: rows lie in pages as well, and rings belong to rows.
    """
    if records and columns != 1:
        raise ConfigError(
            f"columns={columns} with records={records}: a slot keeps either a state or a record per group token; "
            "set one of them"
        )
    shards = mesh.tp * mesh.cp
    layers = mesh.stage_layers(spec.num_layers)[stage]
    mla = tuple(i for i in layers if spec.is_mla(i))
    kda = tuple(i for i in layers if not spec.is_mla(i))
    heads = spec.kda_heads // shards
    latent_dim = spec.kv_lora_rank + spec.qk_rope_head_dim
    state_dtype = "float64" if dtype == "float64" else "float32"
    fields: list[Field] = []
    if mla:
        shape = (len(mla), page_tokens, latent_dim)
        fields.append(Field("latent", Unit.PAGE, shape, dtype, Placement.OWNER, mla))
    if kda:
        d, w = spec.kda_head_dim, spec.conv_width
        state, conv = (heads, len(kda), d, d), (heads, len(kda), 3, d, w - 1)
        head = Placement.HEAD_SHARD
        fields.append(Field("kda", Unit.SLOT, state, state_dtype, head, kda, columns))
        fields.append(Field("conv", Unit.SLOT, conv, dtype, head, kda))
    if draft is not None and stage == mesh.pp - 1:
        unit = Unit.RING if keeps_context else Unit.SLOT if draft_places else Unit.PAGE
        fields.append(_draft_field("draft", draft, shards, page_tokens, dtype, unit, draft_places))
        if keeps_context:
            fields.append(_draft_field("context", draft, shards, page_tokens, dtype, Unit.PAGE))
    return CacheLayout(
        page_tokens=page_tokens,
        kv_dtype=dtype,
        state_dtype=state_dtype,
        conv_dtype=dtype,
        latent_dim=latent_dim,
        kda_heads=spec.kda_heads,
        head_dim=spec.kda_head_dim,
        conv_width=spec.conv_width,
        fields=tuple(fields),
        rollback=Rollback(
            heads=heads,
            layers=len(kda),
            head_dim=spec.kda_head_dim,
            group=max(columns, records),
            records=records,
            record_dtype=state_dtype,
            tail_dtype=dtype,
        ),
    )


def _draft_field(
    name: str,
    draft: DraftSpec,
    shards: int,
    page_tokens: int,
    dtype: str,
    unit: Unit,
    places: int = 0,
) -> Field:
    return Field(
        name,
        unit,
        draft.place_shape(page_tokens, shards),
        dtype,
        Placement.REPLICATED if draft.flavour == "mla" else Placement.HEAD_SHARD,
        tuple(range(draft.num_layers)),
        places or 1,
    )


def layout_document(spec: K3Spec, *, page_tokens: int, dtype: str, model_digest: str) -> bytes:
    """Canonical JSON of everything that must be equal on both sides of a pair.

    Sharding, pool sizes and addresses are not in it: they may differ and are checked by code. Nor is the name the model
    is served under.
    """
    document = {
        "proto_version": PROTO_VERSION,
        "model": model_id(spec),
        "model_digest": model_digest,
        "dtype_kv": dtype,
        "dtype_state": "float64" if dtype == "float64" else "float32",
        "dtype_conv": dtype,
        "page_tokens": page_tokens,
        "kv_lora_rank": spec.kv_lora_rank,
        "rope_dim": spec.qk_rope_head_dim,
        "layers": [[i, "mla" if spec.is_mla(i) else "kda"] for i in range(spec.num_layers)],
        "kda_heads": spec.kda_heads,
        "dk": spec.kda_head_dim,
        "dv": spec.kda_head_dim,
        "conv_width": spec.conv_width,
        "conv_sections": "q,k,v",
        "state_order": "head,layer,dv,dk",
        "quantisation": "none",
        "position": "nope",
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def fingerprint(document: bytes) -> str:
    """SHA-256 of a layout document, hexadecimal."""
    return hashlib.sha256(document).hexdigest()


def first_difference(ours: bytes, theirs: bytes) -> str | None:
    """The first differing field of two layout documents as `name: ours != theirs`, or None."""
    mine, other = json.loads(ours), json.loads(theirs)
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name) != other.get(name):
            return f"{name}: {mine.get(name)!r} != {other.get(name)!r}"
    return None
