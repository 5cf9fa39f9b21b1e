"""Settings that somebody gave and that do nothing beside the others: refused, so that nobody believes in them.

Presets may set them for whoever switches the rest on; only what comes from a file, the environment or a flag counts,
and nothing that is the default anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from k3.config.keys import flatten
from k3.config.rule import Refusal, Rule
from k3.config.tree import EngineConfig

DEFAULTS = flatten(EngineConfig())
OF_CHECKPOINTS = (
    *("cache.checkpoints", "cache.checkpoint_interval", "cache.checkpoint_anchor"),
    *("cache.checkpoint_rungs", "cache.checkpoint_mode"),
)
SLOTS_TWICE = ("cache.checkpoints", "cache.state_slots")
# Of the transfer section only drain_s is read where nothing is transferred: by the end of a rank group.
OF_PREFILL_INSTANCES = (
    *("serve.prefills", "schedule.max_early_prefills", "schedule.reserve_wait_s"),
    "parallel.pp_remote_kv",
    *(path for path in DEFAULTS if path.startswith("transfer.") and path != "transfer.drain_s"),
)


class Given(NamedTuple):
    """A configuration, and the paths that somebody set to something else than the default."""

    config: EngineConfig
    paths: frozenset[str]

    def named(self, paths: Iterable[str]) -> str | None:
        """Those of `paths` that were set, with their values; None without one."""
        values = flatten(self.config)
        found = [f"{path}={values[path]}" for path in paths if path in self.paths]
        return ", ".join(found) or None


def _checkpoints_without_cache(given: Given) -> str | None:
    return given.named(OF_CHECKPOINTS) if given.config.cache.prefix == "off" else None


def _slots_twice(given: Given) -> str | None:
    cache = given.config.cache
    is_twice = cache.prefix == "on" and given.paths >= set(SLOTS_TWICE) and cache.state_slots
    return given.named(SLOTS_TWICE) if is_twice else None


def _of_prefill_instances(given: Given) -> str | None:
    return given.named(OF_PREFILL_INSTANCES)


IDLE_RULES: tuple[Rule[Given], ...] = (
    Rule(
        "CHECKPOINTS_IDLE",
        ("prefill", "decode", "both"),
        OF_CHECKPOINTS,
        "a cache.checkpoint* other than its default is given with cache.prefix = off",
        "states are kept for a prefix cache, and cache.prefix is off",
        "set cache.prefix=on, or leave them out",
        _checkpoints_without_cache,
    ),
    Rule(
        "CHECKPOINTS_BESIDE_SLOTS",
        ("prefill", "decode", "both"),
        SLOTS_TWICE,
        "cache.checkpoints and cache.state_slots are both given",
        "cache.checkpoints only says how many slots there are beside those of requests, and "
        "cache.state_slots says how many there are",
        "leave one of them out",
        _slots_twice,
    ),
    Rule(
        "PREFILL_INSTANCES_IDLE",
        ("both",),
        OF_PREFILL_INSTANCES,
        "a setting about prefill instances is given, other than its default: serve.prefills, "
        "schedule.max_early_prefills, schedule.reserve_wait_s, parallel.pp_remote_kv, or transfer.* other than "
        "transfer.drain_s",
        "an instance that computes every prompt itself calls no prefill instance and transfers nothing",
        "leave them out, or start the instance as plain decode",
        _of_prefill_instances,
    ),
)


def idle(config: EngineConfig, sources: Mapping[str, str]) -> list[Refusal]:
    """Of an engine; sources: where each value came from, by path."""
    changed = (path for path, value in flatten(config).items() if value != DEFAULTS[path])
    given = Given(config, frozenset(path for path in changed if _is_given(sources[path])))
    found = [rule.judge(given, config) for rule in IDLE_RULES if config.role in rule.roles]
    return [refusal for refusal in found if refusal is not None]


def _is_given(source: str) -> bool:
    return source != "default" and not source.startswith("preset ")


def silent_drafter(config: EngineConfig) -> str | None:
    """What to tell whoever gave decode a drafter that it does not load; None when there is nothing to tell."""
    if config.role == "prefill" or not config.spec.drafter or config.spec.draft_tokens:
        return None
    return (
        f"spec.drafter={config.spec.drafter} is not loaded: spec.draft_tokens=0 switches drafts off"
    )
