"""What the configuration says about speculation: whose drafter, how states are taken back, how long a ring.

Prefill keeps draft rows when it has a drafter; it never proposes. Decode has a drafter as soon as it drafts. Pure.
"""

from __future__ import annotations

from pathlib import Path

from k3.config.tree import EngineConfig
from k3.model.dspark_spec import DraftSpec, ring_places
from k3.model.spec import K3Spec


def has_drafter(config: EngineConfig) -> bool:
    """Whether this service keeps draft rows."""
    is_wanted = config.role == "prefill" or config.spec.draft_tokens > 0
    return bool(config.spec.drafter) and is_wanted


def drafter(config: EngineConfig) -> DraftSpec | None:
    """The drafter of this service. Raises ModelError when its folder cannot be read."""
    return DraftSpec.from_folder(Path(config.spec.drafter)) if has_drafter(config) else None


def rollback(config: EngineConfig) -> str:
    """`spec.kda_rollback` without `auto`; `model.device` must be resolved. Groups of one token need no records."""
    if config.spec.kda_rollback != "auto":
        return config.spec.kda_rollback
    return "replay" if config.model.device == "cuda" and config.spec.draft_tokens else "snapshots"


def snapshots(config: EngineConfig) -> int:
    """States that a state slot keeps: the committed one, and in the form of snapshots one per draft."""
    return 1 if records(config) or config.role == "prefill" else 1 + config.spec.draft_tokens


def records(config: EngineConfig) -> int:
    """Tokens whose records a state slot keeps: those of a verify group in the form of replay, else none."""
    keeps = config.role != "prefill" and config.spec.kda_rollback == "replay"
    return 1 + config.spec.draft_tokens if keeps else 0


def is_by_confidence(config: EngineConfig) -> bool:
    """Whether decode asks the drafter how far it trusts each draft."""
    return config.role != "prefill" and config.spec.draft_schedule != "fixed"


def window(config: EngineConfig, spec: K3Spec) -> int:
    """Tokens before the anchor whose rows are read: whole pages; by default those of the longest request."""
    page = config.cache.page_tokens
    tokens = config.spec.draft_window
    if not tokens:
        tokens = config.model.max_model_len or spec.max_position_embeddings
    return -(-tokens // page) * page


def keeps_context(config: EngineConfig) -> bool:
    """Whether rows lie in pages beside the rings: where decode finds prompts in a cache of its own."""
    return config.role == "both" and config.cache.prefix == "on" and has_drafter(config)


def rings(config: EngineConfig) -> int:
    """Rings that belong to rows, a dummy included; 0 where each state slot has one, or none is kept."""
    return config.schedule.max_rows + 1 if keeps_context(config) else 0


def places(config: EngineConfig, spec: K3Spec) -> int:
    """Page places of a slot's draft ring; 0 where rows lie in pages, or nowhere."""
    if config.role == "prefill" or not has_drafter(config):
        return 0
    group = 1 + config.spec.draft_tokens
    return ring_places(window(config, spec), group, config.cache.page_tokens)
