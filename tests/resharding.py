"""Two instances of any shape in plain numpy: what prefill ranks hold, and what decode ranks must hold afterwards.

The truth is one random array per field in global coordinates (layer, page of the prompt, head). Both sides are cut from
it by the definition of the layout, never by the formulas under test. Decode pools start as canaries: a byte that no
sender should touch must still be a canary in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from k3.cache.layout import CacheLayout, Placement, Unit, build_layout
from k3.model.dspark_spec import DraftSpec, ring_places
from k3.model.spec import K3Spec, LayerKind
from k3.transfer.agent import Region
from k3.transfer.plan import Sharding

CONFIG = Path(__file__).parent / "golden" / "k3"
PAGE_TOKENS = 4
CANARY = 0xA5


def make_spec(kinds: str, heads: int) -> K3Spec:
    """kinds: one letter per layer, k or m."""
    spec = K3Spec.from_folder(CONFIG)
    layers = tuple(LayerKind.MLA if kind == "m" else LayerKind.KDA for kind in kinds)
    kda = replace(spec.kda, n_heads=heads, head_dim=2, conv_width=3)
    mla = replace(spec.mla, kv_lora_rank=2, rope_dim=1)
    return replace(spec, layer_kinds=layers, kda=kda, mla=mla)


def sharding(
    n_layers: int,
    *,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    n_pages: int = 9,
    n_slots: int = 3,
    columns: int = 1,
    bounds: tuple[int, ...] = (),
    window: int = 0,
) -> Sharding:
    """A geometry; the layers are split evenly unless `bounds` says otherwise. window: of the draft rings, 0 = none."""
    even = tuple(n_layers * stage // pp for stage in range(pp + 1))
    places = ring_places(window, 8, PAGE_TOKENS) if window else 0
    return Sharding(
        pp,
        tp,
        cp,
        bounds or even,
        n_pages,
        n_slots,
        columns,
        draft_places=places,
        draft_window=window,
    )


def make_draft(flavour: str) -> DraftSpec:
    """A small drafter; its GQA flavour has 8 key heads."""
    config = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 64, "num_key_value_heads": 8, "head_dim": 2,
        "q_lora_rank": 2, "kv_lora_rank": 3, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2,
    }  # fmt: skip
    inner = {"target_layer_ids": [0], "mask_token_id": 1, "markov_rank": 2}
    if flavour == "mla":
        return DraftSpec.from_config(config | inner | {"model_type": "k3_dspark"})
    return DraftSpec.from_config(config | {"dflash_config": inner, "model_type": "qwen3"})


@dataclass
class Rank:
    """One rank's pools, [units, unit bytes] each."""

    layout: CacheLayout
    pools: dict[str, np.ndarray]

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(
            Region(name, pool.ctypes.data, 0, "DRAM", pool.shape[1], pool.shape[0])
            for name, pool in self.pools.items()
        )


def make_ranks(spec: K3Spec, side: Sharding, draft: DraftSpec | None = None) -> list[Rank]:
    """All ranks of an instance, pools full of canaries. draft: with its rows, in pages or in rings."""
    ranks: list[Rank] = []
    for number in range(side.size):
        stage, _shard = side.place(number)
        layout = build_layout(
            spec,
            side.mesh(),
            stage,
            page_tokens=PAGE_TOKENS,
            dtype="float32",
            columns=side.slot_columns,
            draft=draft,
            draft_places=side.draft_places,
        )
        pools: dict[str, np.ndarray] = {}
        for field in layout.fields:
            is_page = field.unit is Unit.PAGE
            units = side.n_pages if is_page else side.n_slots * field.columns
            pools[field.name] = np.full((units, field.unit_bytes), CANARY, np.uint8)
        ranks.append(Rank(layout, pools))
    return ranks


@dataclass
class Truth:
    """latent [layer, page of the prompt, bytes], kda and conv [head, layer, bytes]."""

    latent: np.ndarray
    kda: np.ndarray
    conv: np.ndarray

    @classmethod
    def draw(cls, spec: K3Spec, prompt_pages: int, seed: int) -> Truth:
        random = np.random.default_rng(seed)
        sizes = {
            "latent": 4 * PAGE_TOKENS * (spec.kv_lora_rank + spec.qk_rope_head_dim),
            "kda": 4 * spec.kda_head_dim**2,
            "conv": 4 * 3 * spec.kda_head_dim * (spec.conv_width - 1),
        }
        layers = spec.num_layers

        def bits(*shape: int) -> np.ndarray:
            return random.integers(0, 256, shape, np.uint8)

        return cls(
            bits(layers, prompt_pages, sizes["latent"]),
            bits(spec.kda_heads, layers, sizes["kda"]),
            bits(spec.kda_heads, layers, sizes["conv"]),
        )


def put(
    truth: Truth, side: Sharding, ranks: list[Rank], pages: list[int], slot: int, *, owner: bool
) -> None:
    """Write the truth into pools by the definition of the layout.

    pages: of the whole prompt at prefill (every rank holds all), or with `owner` every rank's own in its order.
    """
    for number, rank in enumerate(ranks):
        _stage, shard = side.place(number)
        for field in rank.layout.fields:
            pool = rank.pools[field.name]
            if field.unit is Unit.PAGE:
                owned = [b for b in range(truth.latent.shape[1]) if b % side.cp == shard % side.cp]
                targets = pages[: len(owned)] if owner else [pages[b] for b in owned]
                view = pool.reshape(side.n_pages, len(field.layers), -1)
                for b, page in zip(owned, targets, strict=True):
                    view[page] = truth.latent[list(field.layers), b]
            else:
                source = truth.kda if field.name == "kda" else truth.conv
                heads = field.shape[0]
                view = pool.reshape(-1, heads, len(field.layers), source.shape[2])
                own = source[shard * heads : (shard + 1) * heads]
                view[slot * field.columns] = own[:, list(field.layers)]


def draw_draft_rows(draft: DraftSpec, prompt_pages: int, seed: int) -> np.ndarray:
    """The drafter's rows of a prompt [page, head, bytes]; a replicated row counts as one head."""
    n_heads = draft.split_axes().get("key heads", 1)
    n_bytes = 4 * int(np.prod(draft.place_shape(PAGE_TOKENS, 1))) // n_heads
    return np.random.default_rng(seed).integers(0, 256, (prompt_pages, n_heads, n_bytes), np.uint8)


def put_draft(rows: np.ndarray, side: Sharding, ranks: list[Rank], units: dict[int, int]) -> None:
    """Write pages of `rows` into units of every rank that holds draft rows. units: page of the prompt -> unit."""
    for number, rank in enumerate(ranks):
        field = rank.layout.field("draft")
        if field is None:
            continue
        _stage, shard = side.place(number)
        whole = field.placement is Placement.REPLICATED
        n = rows.shape[1] if whole else field.shape[0]
        own = rows if whole else rows[:, shard * n : (shard + 1) * n]
        for page, unit in units.items():
            rank.pools["draft"][unit] = own[page].reshape(-1)
