"""One engine instance as the router knows it: identity, state, last snapshot, and what was sent there.

    new -> probing -> ready <-> suspect -> down,  and draining, incompatible

Two good probes in a row (an answered `Describe`, a snapshot) make an instance ready. Time is an argument; `registry.py`
feeds it. A new instance id at the same address is a new instance: everything remembered is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from k3.cache import hash_chain
from k3.v1 import instance_pb2
from router.fleet.circuit import Circuit
from router.fleet.pairing import InstanceView, Need, pages_needed
from router.fleet.prefix import STALE_S, CacheView, PromptPages, RoutedPrompts

log = logging.getLogger("k3.router.fleet")
GOOD_PROBES = 2


class Role(Enum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"


class InstanceState(Enum):
    """Values are what operators see."""

    NEW = "new"
    PROBING = "probing"
    READY = "ready"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"


USABLE = (InstanceState.READY, InstanceState.SUSPECT)
WIRE_ROLES: Mapping[int, Role] = {
    instance_pb2.ROLE_PREFILL: Role.PREFILL,
    instance_pb2.ROLE_DECODE: Role.DECODE,
}


class Claim(NamedTuple):
    """What one sample holds at most on a decode instance."""

    pages: int
    slots: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The newest load and when it came."""

    load: instance_pb2.Load
    at: float


class Instance:
    """State of one address. Mutated only by the registry and its followers, on the event loop."""

    def __init__(self, role: Role, address: str, now: float) -> None:
        self.role = role
        self.address = address
        self.state = InstanceState.NEW
        self.since = now
        self.reason = ""
        self.identity: instance_pb2.DescribeResponse | None = None
        self.snapshot: Snapshot | None = None
        self.circuit = Circuit()
        self.cache = CacheView()
        self._routed = RoutedPrompts()
        self.in_flight = 0
        self._unseen: list[Claim] = []  # sent, not admitted yet, so in no snapshot
        self._good_probes = 0

    @property
    def instance_id(self) -> str:
        """Its own id; before the first answer, its address."""
        return self.identity.instance_id if self.identity else self.address

    @property
    def is_usable(self) -> bool:
        """Whether requests may go there, circuit aside."""
        return self.state in USABLE and self.identity is not None and self.snapshot is not None

    def enter(self, state: InstanceState, now: float, reason: str = "") -> None:
        """Change state, with one log line."""
        if state is not InstanceState.READY and state is not InstanceState.SUSPECT:
            self._good_probes = 0
        if state is self.state:
            return
        log.info(
            "instance changed state",
            extra={
                "instance_id": self.instance_id,
                "address": self.address,
                "instance_role": self.role.value,
                "from_state": self.state.value,
                "to_state": state.value,
                "reason": reason,
            },
        )
        self.state, self.since, self.reason = state, now, reason

    def described(
        self, identity: instance_pb2.DescribeResponse, vocab_size: int, now: float
    ) -> None:
        """An answered `Describe`."""
        if self.identity is not None and self.identity.instance_id != identity.instance_id:
            self.snapshot, self.circuit, self.in_flight, self._unseen = None, Circuit(), 0, []
            self.cache, self._routed = CacheView(), RoutedPrompts()
        self.identity = identity
        role = WIRE_ROLES.get(identity.role)
        if role is not self.role:
            found = role.value if role else "of no role"
            self.enter(
                InstanceState.INCOMPATIBLE, now, f"registered as {self.role.value}, is {found}"
            )
        elif identity.vocab_size != vocab_size:
            reason = f"vocabulary of {identity.vocab_size}, the router's model has {vocab_size}"
            self.enter(InstanceState.INCOMPATIBLE, now, reason)
        else:
            if self.state in (InstanceState.NEW, InstanceState.DOWN, InstanceState.INCOMPATIBLE):
                self.enter(InstanceState.PROBING, now)
            self._good_probe(now)

    def loaded(self, load: instance_pb2.Load, now: float) -> None:
        """A snapshot."""
        self.snapshot = Snapshot(load, now)
        if self.state is InstanceState.INCOMPATIBLE:
            return
        if load.draining:
            self.enter(InstanceState.DRAINING, now)
        elif not load.ready:
            self.enter(InstanceState.PROBING, now, "not ready")
        else:
            if self.state in (InstanceState.DRAINING, InstanceState.DOWN):
                self.enter(InstanceState.PROBING, now)
            self._good_probe(now)

    def suspected(self, reason: str, now: float) -> None:
        """A request failed there."""
        self._good_probes = 0
        if self.state is InstanceState.READY:
            self.enter(InstanceState.SUSPECT, now, reason)

    def is_cache_known(self, now: float) -> bool:
        """Whether its cache events are whole, and recent enough to be believed."""
        is_recent = self.snapshot is not None and now - self.snapshot.at <= STALE_S
        return is_recent and self.cache.is_whole

    def usable_tokens(self, pages: PromptPages, now: float) -> int:
        """Tokens of a prompt that it would not have to compute; the last one always is.

        Hashes nothing where there is no cache.
        """
        if not self.cache.is_there:
            return 0
        chain, page_tokens = self._chain(pages)
        chain = chain[: max(len(pages.token_ids) - 1, 0) // page_tokens]
        if self.is_cache_known(now):
            return self.cache.usable_pages(chain) * page_tokens
        return self._routed.usable_pages(chain, now) * page_tokens

    def routed(self, pages: PromptPages, now: float) -> None:
        """A prompt was sent there."""
        if self.cache.is_there:
            self._routed.sent(self._chain(pages)[0], now)

    def _chain(self, pages: PromptPages) -> tuple[tuple[bytes, ...], int]:
        assert self.identity is not None
        identity = self.identity
        namespace = hash_chain.namespace(identity.layout_fingerprint, identity.draft_fingerprint)
        return pages.chain(namespace, identity.page_tokens), identity.page_tokens

    def send(self, claim: Claim) -> None:
        """A sample goes there."""
        self.in_flight += 1
        self._unseen.append(claim)

    def seen(self, claim: Claim) -> None:
        """A sample sent there is in the snapshots now."""
        self._unseen.remove(claim)

    def _good_probe(self, now: float) -> None:
        self._good_probes += 1
        is_new = self.state in (InstanceState.PROBING, InstanceState.SUSPECT)
        is_open = self.snapshot is not None and self.snapshot.load.ready
        if is_new and is_open and self._good_probes >= GOOD_PROBES:
            self.enter(InstanceState.READY, now)

    def view(self) -> InstanceView:
        """What pairing sees. Only for usable instances."""
        assert self.identity is not None
        assert self.snapshot is not None
        identity, load = self.identity, self.snapshot.load
        is_decode = self.role is Role.DECODE
        taken = load.state_slots_used + load.state_slots_quarantined + load.state_slots_pinned
        slots = load.state_slots_total - taken
        if is_decode:
            slots = min(slots, identity.max_rows - load.rows_used)
        return InstanceView(
            instance_id=identity.instance_id,
            address=self.address,
            layout_fingerprint=identity.layout_fingerprint,
            model_digest=identity.model_digest,
            is_suspect=self.state is InstanceState.SUSPECT,
            group_tokens=identity.page_tokens * (max(identity.geometry.cp, 1) if is_decode else 1),
            draft_tokens=identity.draft_tokens,
            depth=max(identity.depth, 1),
            max_model_len=identity.max_model_len,
            max_rows=identity.max_rows,
            local_prefill_max=identity.local_prefill_max,
            pages_free=load.pages_free + load.pages_cached - sum(d.pages for d in self._unseen),
            pages_total=load.pages_total,
            slots_free=slots - load.waiting - sum(d.slots for d in self._unseen),
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            in_flight=self.in_flight,
        )


class Lease:
    """One sample sent to a pair: counted there until released. `admitted` when decode's snapshots include it."""

    def __init__(self, decode: Instance, prefill: Instance | None, need: Need, now: float) -> None:
        self._decode = decode
        self._decode_id = decode.instance_id  # a restarted one has forgotten us: nothing to undo
        self._prefill = prefill
        self._prefill_id = prefill.instance_id if prefill else ""
        self._claim: Claim | None = Claim(pages_needed(need, decode.view()), 1)
        decode.send(self._claim)
        if prefill is not None:
            prefill.in_flight += 1
        if need.pages is not None:
            (prefill or decode).routed(need.pages, now)  # decode without one computes the prompt

    def admitted(self) -> None:
        """Decode holds the memory: from now on it is in the snapshots."""
        if self._claim is not None and self._decode.instance_id == self._decode_id:
            self._decode.seen(self._claim)
        self._claim = None

    def prefilled(self) -> None:
        """The prompt is computed."""
        if self._prefill is not None and self._prefill.instance_id == self._prefill_id:
            self._prefill.in_flight -= 1
        self._prefill = None

    def release(self) -> None:
        """The sample has ended. Call once."""
        self.admitted()
        self.prefilled()
        if self._decode.instance_id == self._decode_id:
            self._decode.in_flight -= 1
