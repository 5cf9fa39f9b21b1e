"""The layout of a rank's caches is that of its configuration, and `auto` pages fill the memory beside all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3.cache.layout import CacheLayout, Unit
from k3.config import speculation
from k3.config.caches import layout_of
from k3.config.commandline import CommandLine
from k3.config.load import load_engine
from k3.config.tree import EngineConfig
from k3.model.spec import K3Spec

DRAFTS = {
    "model.max_model_len": "4096",
    "spec.drafter": "draft-mla",
    "spec.draft_tokens": "3",
    "spec.draft_window": "64",
    "cache.memory_bytes": "80MiB",
}
KEEPS_CONTEXT = DRAFTS | {"role": "both", "cache.prefix": "on"}


def loaded(flags: dict[str, str]) -> tuple[EngineConfig, CacheLayout]:
    config = load_engine("decode", CommandLine(flags=flags), {}).require()
    return config, layout_of(config, K3Spec.from_folder(Path(config.model.path)), 0)


@pytest.mark.parametrize(("form", "columns", "records"), [("snapshots", 4, 0), ("replay", 1, 4)])
def test_a_slot_keeps_states_or_records_of_a_group(form: str, columns: int, records: int) -> None:
    _config, layout = loaded(DRAFTS | {"spec.kda_rollback": form})
    kda = layout.field("kda")
    assert kda is not None
    assert (kda.columns, layout.rollback.records) == (columns, records)


@pytest.mark.parametrize("flags", [DRAFTS, KEEPS_CONTEXT], ids=["slots", "rows"])
def test_rings_belong_to_rows_where_draft_rows_lie_in_pages_too(flags: dict[str, str]) -> None:
    _config, layout = loaded(flags)
    draft, is_kept = layout.field("draft"), flags is KEEPS_CONTEXT
    assert draft is not None
    assert draft.unit is (Unit.RING if is_kept else Unit.SLOT)
    assert (layout.field("context") is not None) is is_kept


@pytest.mark.parametrize(
    "flags",
    [DRAFTS, DRAFTS | {"spec.kda_rollback": "replay"}, KEEPS_CONTEXT],
    ids=["snapshots", "replay", "rings"],
)
def test_pages_fill_the_memory_beside_slots_and_rings(flags: dict[str, str]) -> None:
    config, layout = loaded(flags)
    cache, n_rings = config.cache, speculation.rings(config)
    least, most = (
        layout.total_bytes(cache.pages + more, cache.state_slots, n_rings) for more in (0, 1)
    )
    assert least <= cache.memory_bytes < most
