"""Prompts computed on one rank, and what a transfer would send of them, dealt out by the definition of the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from k3.cache.layout import Field, Placement, Unit
from k3.cache.storage import Storage
from k3.model.draft_ring import write_rows
from k3.model.dspark import open_context
from k3.model.dspark_spec import DraftSpec
from k3.parallel.mesh import WHOLE, Place
from tests.model_runner import CPU, OPS, Pools, solo_stage

PAGE = 4


class Prefill:
    """Prompts on one rank, chunk by chunk; with a drafter folder it also writes context rows."""

    def __init__(
        self,
        folder: Path,
        drafter: Path | None = None,
        dtype: str = "float64",
        page_tokens: int = PAGE,
    ) -> None:
        self.page_tokens = page_tokens
        self.draft = DraftSpec.from_folder(drafter) if drafter is not None else None
        taps = self.draft.taps if self.draft is not None else ()
        stream = self.draft.tap_stream if self.draft is not None else "prefix"
        self.stage = solo_stage(folder, dtype, taps=taps, tap_stream=stream)
        self.context = (
            open_context(drafter, WHOLE, dtype=dtype, device=CPU, ops=OPS.dense)
            if drafter is not None
            else None
        )

    def __call__(self, prompt: Sequence[int], chunk: int = 5) -> dict[str, Tensor]:
        """What is sent of a prompt, by field: pages in order of the prompt [page, ...], states [...]."""
        page = self.page_tokens
        pools = Pools(self.stage, 1, len(prompt), page)
        [place] = pools.requests
        n_pages = -(-len(prompt) // page)
        draft = torch.empty(0)
        if self.draft is not None:
            shape = (n_pages, *self.draft.place_shape(page, 1))
            draft = torch.full(shape, float("nan"), dtype=self.stage.dtype)
        for at in range(0, len(prompt), chunk):
            ids = prompt[at : at + chunk]
            taps = pools.chunk([(place, ids)]).taps_TXD
            if self.context is not None:
                position = torch.arange(at, at + len(ids))
                write_rows(draft, position // page, position % page, self.context(taps, position))
        sent = {"latent": pools.storage.pools["latent"][place.pages.long()[:n_pages]]}
        sent |= {name: pools.storage.pools[name][place.slot] for name in ("kda", "conv")}
        return sent if self.draft is None else sent | {"draft": draft}


def deal(
    sent: Mapping[str, Tensor],
    storage: Storage,
    place: Place,
    pages: Sequence[int],
    slot: int,
    window: int,
    prompt_len: int,
) -> None:
    """One rank's share of a prefilled request. window: positions whose draft rows are sent."""
    page_tokens = storage.layout.page_tokens
    n_pages = -(-prompt_len // page_tokens)
    for field in storage.layout.fields:
        if field.name not in sent:
            continue
        pool, whole = storage.pools[field.name], sent[field.name]
        if field.name != "draft":  # pages: [page, layer, ...], states: [head, layer, ...]
            whole = whole[:, held(field, whole.shape[1], place)]
        if field.unit is Unit.PAGE:
            for local, page in enumerate(range(place.cp_rank, n_pages, place.mesh.cp)):
                pool[pages[local]] = whole[page]
        elif field.name == "draft":
            for page in range(max(0, prompt_len - window) // page_tokens, n_pages):
                pool[slot * field.columns + page % field.columns] = own(whole[page], field, place)
        else:
            pool[slot * field.columns] = own(whole, field, place)


def held(field: Field, n_layers: int, place: Place) -> slice:
    """Of all layers of the field's kind, those of a rank's stage: a run, before which the earlier stages lie."""
    if place.is_first:
        return slice(0, len(field.layers))
    if place.is_last:
        return slice(n_layers - len(field.layers), n_layers)
    raise AssertionError("no test has three stages")


def own(whole: Tensor, field: Field, place: Place) -> Tensor:
    """A rank's heads of one unit."""
    if field.placement is not Placement.HEAD_SHARD:
        return whole
    return whole[place.shard.of(whole.shape[0])]
