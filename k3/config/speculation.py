"""What the configuration says about speculation: whose drafter, how many snapshots, how long a ring.

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


def snapshots(config: EngineConfig) -> int:
    """States that a state slot keeps: at decode the committed one and one per draft."""
    return 1 if config.role == "prefill" else 1 + config.spec.draft_tokens


def window(config: EngineConfig, spec: K3Spec) -> int:
    """Tokens before the anchor whose rows are read: whole pages; by default those of the longest request."""
    page = config.cache.page_tokens
    tokens = config.spec.draft_window
    if not tokens:
        tokens = config.model.max_model_len or spec.max_position_embeddings
    return -(-tokens // page) * page


def places(config: EngineConfig, spec: K3Spec) -> int:
    """Page places of a slot's draft ring; 0 where rows lie in pages, or nowhere."""
    if config.role == "prefill" or not has_drafter(config):
        return 0
    group = 1 + config.spec.draft_tokens
    return ring_places(window(config, spec), group, config.cache.page_tokens)
