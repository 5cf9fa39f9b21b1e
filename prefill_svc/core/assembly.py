"""The scheduler of prompts as a configuration describes it, for whoever computes prompts: prefill, or decode itself."""

from __future__ import annotations

from collections.abc import Sequence

from k3.cache import hash_chain
from k3.config.stages import chunk_costs
from k3.config.tree import EngineConfig
from prefill_svc.core.cache_events import OnEvent, unheard
from prefill_svc.core.checkpoints import Mode
from prefill_svc.core.chunk_size import ChunkCost
from prefill_svc.core.ladder import Ladder, RungPolicy
from prefill_svc.core.plan import Policy
from prefill_svc.core.scheduler import PrefillScheduler


def has_cache(config: EngineConfig) -> bool:
    """Whether prompts reuse what earlier ones left."""
    return config.cache.prefix == "on"


def page_chain(
    config: EngineConfig, namespace: str, token_ids: Sequence[int], salt: bytes
) -> tuple[bytes, ...]:
    """Hashes of a prompt's pages; none with the cache off."""
    if not has_cache(config):
        return ()
    page_tokens = config.cache.page_tokens
    parent = hash_chain.root(namespace, page_tokens, salt=salt)
    return hash_chain.page_hashes(parent, token_ids, page_tokens)


def ladder(config: EngineConfig) -> Ladder:
    """Where states are kept."""
    cache = config.cache
    if not has_cache(config):
        return Ladder(cache.page_tokens)
    return Ladder(
        cache.page_tokens,
        cache.checkpoint_interval,
        cache.checkpoint_anchor,
        policy=RungPolicy(cache.checkpoint_rungs),
    )


def policy(config: EngineConfig) -> Policy:
    """How steps are filled: a plan per pipeline stage in flight."""
    schedule, budget, costs = config.schedule, config.schedule.token_budget, chunk_costs(config)
    return Policy(
        token_budget=budget,
        max_inflight=config.parallel.pp,
        chunk_align=config.cache.page_tokens,
        max_running=schedule.max_rows,
        max_queue=schedule.max_queue,
        short_len=budget,
        max_long=config.parallel.pp,
        chunk_cost=ChunkCost(*costs, budget) if costs else None,
    )


def prompt_scheduler(
    config: EngineConfig, *, n_dummies: int = 0, on_event: OnEvent = unheard
) -> PrefillScheduler:
    """With empty pools. n_dummies: state slots, the first ones, that no prompt gets."""
    return PrefillScheduler(
        policy(config),
        n_pages=config.cache.pages,
        n_slots=config.cache.state_slots - n_dummies,
        page_tokens=config.cache.page_tokens,
        ladder=ladder(config),
        mode=Mode(config.cache.checkpoint_mode),
        on_event=on_event,
        first_slot=n_dummies,
    )


def held_up(config: EngineConfig) -> list[str]:
    """What works, but not as well as it could."""
    cache, budget = config.cache, config.parallel.pp * config.schedule.token_budget
    is_held = has_cache(config) and config.parallel.pp > 1 and cache.checkpoint_mode == "fork_hold"
    if is_held and cache.checkpoint_interval < budget:
        return [
            f"cache.checkpoint_mode=fork_hold with cache.checkpoint_interval={cache.checkpoint_interval} below "
            f"parallel.pp * schedule.token_budget = {budget}: stages wait for one another; use fork_at_schedule"
        ]
    return []
