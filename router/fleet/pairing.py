"""Which decode instance serves a request, and which prefill instances may compute its prompt. Pure.

Decode is chosen first, among those whose last snapshot has room for the request's worst case; then an ordered list of
prefill candidates with the same cache layout and model, or none where decode computes the prompt itself. This is an
estimate: nothing is reserved here, decode admits or refuses. Suspect instances come only when no other exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from router.fleet.prefix import PromptPages


@dataclass(frozen=True, slots=True)
class InstanceView:
    """What pairing sees of one usable instance.

    group_tokens: tokens a page holds over all ranks (page_tokens * cp). pages_free counts what can be handed out now,
    less what was sent there and is not in a snapshot yet. slots: state slots on decode, bounded by rows. usable_tokens:
    tokens of the request's prompt that an instance need not compute. local_prefill_max: longest prompt that a
    decode instance computes itself.
    """

    instance_id: str
    address: str
    layout_fingerprint: str
    model_digest: str
    is_suspect: bool = False
    group_tokens: int = 16
    draft_tokens: int = 0
    depth: int = 1
    max_model_len: int = 0
    max_rows: int = 1
    pages_free: int = 0
    pages_total: int = 0
    slots_free: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    in_flight: int = 0
    usable_tokens: int = 0
    local_prefill_max: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether a decode instance computes every prompt itself."""
        return 0 < self.max_model_len <= self.local_prefill_max


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of an instance: tokens of its prompt, output tokens at most, samples.

    pages: names what is in the prompt. session: what the client says belongs together; empty = nothing.
    """

    prompt_len: int
    max_tokens: int
    n_samples: int = 1
    pages: PromptPages | None = field(default=None, compare=False)
    session: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """The choice: decode, and prefill candidates in order of preference; none where decode needs none."""

    decode: InstanceView
    prefills: tuple[InstanceView, ...]


Look = Callable[[InstanceView], InstanceView]


def _as_it_is(view: InstanceView) -> InstanceView:
    return view


class NoPair(Enum):
    """Why there is no pair."""

    NO_DECODE = "no_decode_available"
    NO_PREFILL = "no_prefill_available"
    FULL = "capacity_exceeded"
    NEVER_FITS = "context_length_exceeded"


class Policy(Protocol):
    """Orders instances for a request; `policies.py` has them all."""

    def order(self, views: Sequence[InstanceView], need: Need) -> list[InstanceView]:
        """The same instances, best first."""
        ...


@dataclass(frozen=True, slots=True)
class PairingRules:
    """How one router pairs: a policy per role and the number of prefill candidates."""

    decode: Policy
    prefill: Policy
    n_candidates: int


def worst_tokens(need: Need, draft_tokens: int, depth: int) -> int:
    """Tokens decode reserves for one sample: prompt, output and the slack of steps in flight."""
    if need.max_tokens <= 1:
        return need.prompt_len
    return need.prompt_len + need.max_tokens - 2 + depth * (draft_tokens + 1)


def pages_needed(need: Need, view: InstanceView) -> int:
    """Pages one sample holds at most on a decode instance."""
    return -(-worst_tokens(need, view.draft_tokens, view.depth) // view.group_tokens)


def can_ever_decode(need: Need, view: InstanceView) -> bool:
    """Whether an idle instance could take the request."""
    fits_context = need.prompt_len + need.max_tokens <= view.max_model_len
    return fits_context and pages_needed(need, view) <= view.pages_total


def can_decode_now(need: Need, view: InstanceView) -> bool:
    """Whether the last snapshot has room for as many samples at once as the instance could ever hold."""
    pages = max(pages_needed(need, view), 1)
    n_samples = max(min(need.n_samples, view.pages_total // pages, view.max_rows), 1)
    return view.pages_free >= n_samples * pages and view.slots_free >= n_samples


def can_prefill(need: Need, view: InstanceView) -> bool:
    """Whether the prompt fits into the instance at all."""
    return need.prompt_len <= min(view.pages_total * view.group_tokens, view.max_model_len)


def computes(need: Need, view: InstanceView) -> bool:
    """Whether a decode instance computes the prompt itself."""
    return need.prompt_len <= view.local_prefill_max


def capacity_tokens(view: InstanceView) -> int:
    """Longest prompt + output an idle decode instance holds."""
    slack = view.depth * (view.draft_tokens + 1) - 2
    return view.pages_total * view.group_tokens - max(slack, 0)


def choose(
    need: Need,
    prefills: Collection[InstanceView],
    decodes: Collection[InstanceView],
    rules: PairingRules,
    is_compatible: Callable[[InstanceView, InstanceView], bool],
    look: Look = _as_it_is,
) -> Pair | NoPair:
    """A pair, or why not. `is_compatible(decode, prefill)` says whether the two can transfer.

    look: a view with what takes time to find out, of instances that could compute the prompt; asked only where decode
    has room.
    """
    if not decodes:
        return NoPair.NO_DECODE
    able = [view for view in decodes if can_ever_decode(need, view)]
    if not able:
        return NoPair.NEVER_FITS
    candidates = [view for view in prefills if can_prefill(need, view)]
    paired = [
        view
        for view in able
        if computes(need, view) or any(is_compatible(view, other) for other in candidates)
    ]
    if not paired:
        return NoPair.NEVER_FITS if prefills and not candidates else NoPair.NO_PREFILL
    roomy = [view for view in paired if can_decode_now(need, view)]
    if not roomy:
        return NoPair.FULL
    seen = [look(view) if computes(need, view) else view for view in roomy]
    decode = trusted_first(rules.decode, seen, need)[0]
    if computes(need, decode):
        return Pair(decode, ())
    fitting = [look(view) for view in candidates if is_compatible(decode, view)]
    return Pair(decode, tuple(trusted_first(rules.prefill, fitting, need)[: rules.n_candidates]))


def trusted_first(policy: Policy, views: Iterable[InstanceView], need: Need) -> list[InstanceView]:
    """Order by policy, suspects after all others. A policy is asked once, as some take turns."""
    views = list(views)
    trusted = [view for view in views if not view.is_suspect]
    suspect = [view for view in views if view.is_suspect]
    return [*policy.order(trusted, need), *suspect] if trusted else policy.order(suspect, need)


def same_layout(decode: InstanceView, prefill: InstanceView) -> bool:
    """Whether cache layout and weights of the two are the same."""
    return (
        decode.layout_fingerprint == prefill.layout_fingerprint
        and decode.model_digest == prefill.model_digest
    )
