"""Movers of a pair under any order of transfers, aborts, delays, failures, stalls and rebuilds.

Laws: a byte changes only while a transfer to its page or slot is not yet quiet; a transfer that arrived on every rank
is complete there; every transfer that is aborted becomes quiet on every sender, in bounded time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3.config.tree import TransferConfig
from k3.transfer.local import Fate, LocalFabric
from k3.v1 import plan_pb2
from tests.movers import Net, Reached
from tests.resharding import PAGE_TOKENS, Truth, make_ranks, put, sharding

CONFIG = TransferConfig(handle_deadline_s=3.0, drain_s=2.0, resend_after_s=1.0, handles_in_flight=2)
PREFILL = sharding(3, pp=2, n_pages=40, n_slots=12)
DECODE = sharding(3, cp=2, n_pages=9, n_slots=4, columns=2)
QUIET_S = CONFIG.handle_deadline_s + CONFIG.drain_s + 1.0

fates = st.builds(
    Fate,
    delay_s=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    fails=st.sampled_from([False, False, False, True]),
    loses_record=st.sampled_from([False, False, False, True]),
    stalls=st.sampled_from([False] * 7 + [True]),
)


@dataclass
class Sending:
    """One transfer as the test knows it."""

    transfer_id: int
    prompt_len: int
    sources: list[int]
    targets: list[int]
    slot: int
    seed: int
    n_copied: int = 0
    is_aborted: bool = False
    expected: list = field(default_factory=list)

    @property
    def n_pages(self) -> int:
        return len(self.sources)


class Movers(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.fabric = LocalFabric(lambda: 0.0)
        self.coming: list[Fate] = []
        self.fabric.fate = lambda _s, _r: self.coming.pop(0) if self.coming else Fate()
        self.net = Net(prefill=PREFILL, decode=DECODE, config=CONFIG, fabric=self.fabric)
        self.net.connect()
        self.sendings: dict[int, Sending] = {}
        self.open: set[int] = set()  # their places may be written
        self.next_id = 1
        self.step = 0
        self.frozen = self.net.snapshot()

    # ---------------------------------------------------------------- what happens

    def _free(self, total: int, used: list[int]) -> list[int]:
        return [i for i in range(total) if i not in used]

    @precondition(lambda self: len(self.open) < 3)
    @rule(prompt_len=st.integers(1, 4 * PAGE_TOKENS), seed=st.integers(0, 9))
    def begin(self, prompt_len, seed):
        live = [self.sendings[i] for i in self.open]
        n = -(-prompt_len // PAGE_TOKENS)
        pages = self._free(DECODE.n_pages, [p for s in live for p in s.targets])[: (n + 1) // 2]
        slot = self._free(DECODE.n_slots, [s.slot for s in live])[0]
        i = self.next_id
        self.next_id += 1
        base = (4 * i) % PREFILL.n_pages
        sending = Sending(i, prompt_len, list(range(base, base + n)), pages, slot, seed)
        truth = Truth.draw(self.net.spec, n, seed)
        put(truth, PREFILL, self.net.senders, sending.sources, i % PREFILL.n_slots, owner=False)
        sending.expected = make_ranks(self.net.spec, DECODE)
        put(truth, DECODE, sending.expected, pages, slot, owner=True)
        self.sendings[i] = sending
        self.open.add(i)
        self.net.expect(i, prompt_len)
        self.net.start(i, prompt_len, pages, slot=slot)

    def _unfinished(self) -> list[Sending]:
        live = [self.sendings[i] for i in sorted(self.open)]
        return [s for s in live if s.n_copied < s.n_pages and not s.is_aborted]

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data(), waits=st.booleans())
    def copy(self, data, waits):
        sending = data.draw(st.sampled_from(self._unfinished()))
        n = data.draw(st.integers(1, sending.n_pages - sending.n_copied))
        first, sending.n_copied = sending.n_copied, sending.n_copied + n
        self.net.copy(
            sending.transfer_id,
            first_page=first,
            pages=sending.sources[first : first + n],
            after_step=self.step + 1 if waits else 0,
            last=sending.n_copied == sending.n_pages,
            state_slot=sending.transfer_id % PREFILL.n_slots,
            tokens=min(sending.n_copied * PAGE_TOKENS, sending.prompt_len),
        )

    @rule(coming=st.lists(fates, min_size=1, max_size=4))
    def foretell(self, coming):
        self.coming = coming

    @rule()
    def finish_step(self):
        self.step += 1
        for node in self.net.out:
            node.core.step_done(self.step, Reached())

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data):
        sending = self.sendings[data.draw(st.sampled_from(sorted(self.open)))]
        sending.is_aborted = True
        self.net.abort(sending.transfer_id)

    @rule()
    def resume_stalled(self):
        self.fabric.resume()
        self.net.run(0.05)
        self.fabric.is_resumed = False

    @rule(seconds=st.sampled_from([0.01, 0.4, 2.5]))
    def wait(self, seconds):
        self.net.run(seconds)

    @rule()
    def reconnect_and_answer_what_is_missing(self):
        self.net.connect()
        for node in self.net.into:
            for missing in node.heard("missing"):
                command = plan_pb2.ResendTransferRecords(
                    transfer_id=missing.transfer_id, missing=missing.missing
                )
                if missing.transfer_id in self.open:
                    for sender in self.net.out:
                        sender.tell(resend=command)
            node.said = [status for status in node.said if not status.HasField("missing")]
        self.net.run(0.05)

    # ---------------------------------------------------------------- what must hold

    def _everywhere(self, nodes: list, kind: str, transfer_id: int) -> bool:
        return all(any(s.transfer_id == transfer_id for s in node.heard(kind)) for node in nodes)

    def _writable(self, name: str) -> set[int]:
        units: set[int] = set()
        for transfer_id in self.open:
            sending = self.sendings[transfer_id]
            if name == "latent":
                units |= set(sending.targets)
            else:
                units.add(sending.slot * (DECODE.slot_columns if name == "kda" else 1))
        return units

    @invariant()
    def bytes_change_only_where_a_transfer_is_open(self):
        for rank, frozen in zip(self.net.receivers, self.frozen, strict=True):
            for name, pool in rank.pools.items():
                changed = set(np.nonzero((pool != frozen[name]).any(axis=1))[0].tolist())
                assert changed <= self._writable(name), f"{name}: {changed} changed"

    @invariant()
    def what_has_arrived_is_complete_and_what_is_quiet_is_closed(self):
        for transfer_id in sorted(self.open):
            if self._everywhere(self.net.into, "arrived", transfer_id):
                self._assert_complete(self.sendings[transfer_id])
            if self._everywhere(self.net.out, "quiet", transfer_id):
                self._close(transfer_id)
            elif self._everywhere(self.net.out, "sent", transfer_id):
                sending = self.sendings[transfer_id]
                if self._everywhere(self.net.into, "arrived", transfer_id):
                    self._close(transfer_id)
                    self.net.abort(transfer_id)
                    sending.is_aborted = True

    def _assert_complete(self, sending: Sending) -> None:
        for rank, expected in zip(self.net.receivers, sending.expected, strict=True):
            for name, pool in rank.pools.items():
                mask = (expected.pools[name] != 0xA5).any(axis=1)
                np.testing.assert_array_equal(pool[mask], expected.pools[name][mask], err_msg=name)

    def _close(self, transfer_id: int) -> None:
        """Its places may not change any more."""
        self.open.discard(transfer_id)
        for node in self.net.into:
            node.tell(abort=plan_pb2.AbortTransfer(transfer_id=transfer_id))
        self.frozen = self.net.snapshot()

    def teardown(self):
        for transfer_id in self.open:
            self.net.abort(transfer_id)
        self.net.run(QUIET_S)
        for transfer_id in self.open:
            assert self._everywhere(self.net.out, "quiet", transfer_id), f"{transfer_id} not quiet"
        self.bytes_change_only_where_a_transfer_is_open()


TestMovers = Movers.TestCase
TestMovers.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
