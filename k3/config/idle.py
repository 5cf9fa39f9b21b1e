"""Settings that somebody gave and that do nothing beside the others: refused, so that nobody believes in them.

Presets may set them for whoever switches the rest on; only what comes from a file, the environment or a flag counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from k3.config.keys import Value, flatten
from k3.config.rule import Refusal
from k3.config.tree import EngineConfig

OF_CHECKPOINTS = (
    *("cache.checkpoints", "cache.checkpoint_interval", "cache.checkpoint_anchor"),
    *("cache.checkpoint_rungs", "cache.checkpoint_mode"),
)


def _is_given(source: str) -> bool:
    return source != "default" and not source.startswith("preset ")


def idle(config: EngineConfig, sources: Mapping[str, str]) -> list[Refusal]:
    """Of an engine; sources: where each value came from, by path."""
    given = {path for path, source in sources.items() if _is_given(source)}
    values = flatten(config)
    problems: list[Refusal] = []
    useless = [path for path in OF_CHECKPOINTS if path in given]
    if useless and config.cache.prefix == "off":
        problems.append(
            Refusal(
                "CHECKPOINTS_IDLE",
                _named(useless, values),
                "states are kept for a prefix cache, and cache.prefix is off",
                "set cache.prefix=on, or leave them out",
            )
        )
    both = ("cache.checkpoints", "cache.state_slots")
    if config.cache.prefix == "on" and given >= set(both) and config.cache.state_slots:
        problems.append(
            Refusal(
                "CHECKPOINTS_BESIDE_SLOTS",
                _named(both, values),
                "cache.checkpoints only says how many slots there are beside those of requests, and "
                "cache.state_slots says how many there are",
                "leave one of them out",
            )
        )
    return problems


def silent_drafter(config: EngineConfig) -> str | None:
    """What to tell whoever gave decode a drafter that it does not load; None when there is nothing to tell."""
    if config.role == "prefill" or not config.spec.drafter or config.spec.draft_tokens:
        return None
    return (
        f"spec.drafter={config.spec.drafter} is not loaded: spec.draft_tokens=0 switches drafts off"
    )


def _named(paths: tuple[str, ...] | list[str], values: Mapping[str, Value]) -> str:
    return ", ".join(f"{path}={values[path]}" for path in paths)
