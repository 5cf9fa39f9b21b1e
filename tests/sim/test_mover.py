"""Movers of a pair under any order of transfers, aborts, delays, failures, stalls and rebuilds.

Every story is drawn from one seed by weighted dice: rules picked evenly rarely get as far as bytes.
Laws: a byte changes only while a transfer to its page or slot is not yet quiet; a transfer that arrived on every rank
is complete there; every transfer that is aborted becomes quiet on every sender, in bounded time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from k3.config.tree import TransferConfig
from k3.transfer.local import Fate, LocalFabric
from k3.v1 import plan_pb2
from tests.movers import Net, Reached
from tests.resharding import PAGE_TOKENS, Truth, make_ranks, put, sharding

CONFIG = TransferConfig(handle_deadline_s=3.0, drain_s=2.0, resend_after_s=1.0, handles_in_flight=2)
PREFILL = sharding(3, pp=2, n_pages=40, n_slots=12)
DECODE = sharding(3, cp=2, n_pages=9, n_slots=4, columns=2)
QUIET_S = CONFIG.handle_deadline_s + CONFIG.drain_s + 1.0

N_STORIES, N_EVENTS = 12, 200


@dataclass
class Sending:
    """One transfer as the test knows it."""

    transfer_id: int
    prompt_len: int
    sources: list[int]
    targets: list[int]
    slot: int
    n_copied: int = 0
    is_aborted: bool = False
    expected: list = field(default_factory=list)

    @property
    def n_pages(self) -> int:
        return len(self.sources)


class Story:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.fabric = LocalFabric(lambda: 0.0, lambda _sender, _receiver: self._fate())
        self.net = Net(prefill=PREFILL, decode=DECODE, config=CONFIG, fabric=self.fabric)
        self.net.connect()
        self.sendings: dict[int, Sending] = {}
        self.open: set[int] = set()  # their places may be written
        self.next_id = 1
        self.is_fair = False
        self.step = 0
        self.frozen = self.net.snapshot()

    # ---------------------------------------------------------------- what happens

    def tell(self) -> None:
        """All of it, the laws checked after every event."""
        events = {
            self.begin: 5,
            self.copy: 8,
            self.finish_step: 3,
            self.abort: 1,
            self.resume_stalled: 1,
            self.wait: 8,
            self.answer_what_is_missing: 2,
            self.reconnect: 1,
            self.rebuild_a_receiver: 0.1,
        }
        for _ in range(N_EVENTS):
            (event,) = self.dice.choices(list(events), list(events.values()))
            event()
            self.check()
        self.end()

    def _fate(self) -> Fate:
        if self.is_fair:
            return Fate()
        return Fate(
            delay_s=self.dice.choice([0.0, 0.0, 0.1, 1.0]),
            fails=self.dice.random() < 0.05,
            loses_record=self.dice.random() < 0.05,
            stalls=self.dice.random() < 0.02,
        )

    def _free(self, total: int, used: list[int]) -> list[int]:
        return [i for i in range(total) if i not in used]

    def begin(self) -> None:
        live = [self.sendings[i] for i in self.open]
        if len(live) == 3:
            return
        prompt_len = self.dice.randint(1, 4 * PAGE_TOKENS)
        n = -(-prompt_len // PAGE_TOKENS)
        pages = self._free(DECODE.n_pages, [p for s in live for p in s.targets])[: (n + 1) // 2]
        slot = self._free(DECODE.n_slots, [s.slot for s in live])[0]
        i = self.next_id
        self.next_id += 1
        base = (4 * i) % PREFILL.n_pages
        sending = Sending(i, prompt_len, list(range(base, base + n)), pages, slot)
        truth = Truth.draw(self.net.spec, n, i)
        put(truth, PREFILL, self.net.senders, sending.sources, i % PREFILL.n_slots, owner=False)
        sending.expected = make_ranks(self.net.spec, DECODE)
        put(truth, DECODE, sending.expected, pages, slot, owner=True)
        self.sendings[i] = sending
        self.open.add(i)
        self.net.expect(i, prompt_len)
        self.net.start(i, prompt_len, pages, slot=slot)

    def copy(self) -> None:
        live = [self.sendings[i] for i in sorted(self.open)]
        unfinished = [s for s in live if s.n_copied < s.n_pages and not s.is_aborted]
        if not unfinished:
            return
        sending = self.dice.choice(unfinished)
        n = self.dice.randint(1, sending.n_pages - sending.n_copied)
        first, sending.n_copied = sending.n_copied, sending.n_copied + n
        self.net.copy(
            sending.transfer_id,
            first_page=first,
            pages=sending.sources[first : first + n],
            after_step=self.step + self.dice.choice([0, 1]),
            last=sending.n_copied == sending.n_pages,
            state_slot=sending.transfer_id % PREFILL.n_slots,
            tokens=min(sending.n_copied * PAGE_TOKENS, sending.prompt_len),
        )

    def finish_step(self) -> None:
        self.step += 1
        for node in self.net.out:
            node.core.step_done(self.step, Reached())

    def abort(self) -> None:
        if self.open:
            self._give_up(self.dice.choice(sorted(self.open)))

    def _give_up(self, transfer_id: int) -> None:
        if not self.sendings[transfer_id].is_aborted:
            self.sendings[transfer_id].is_aborted = True
            self.net.abort(transfer_id)

    def resume_stalled(self) -> None:
        self.fabric.resume()
        self.net.run(0.05)
        self.fabric.is_resumed = False

    def wait(self) -> None:
        self.net.run(self.dice.choice([0.01, 0.01, 0.2, 1.5]))

    def reconnect(self) -> None:
        """As the front does when a peer is lost; harmless otherwise."""
        self.net.connect()

    def rebuild_a_receiver(self) -> None:
        """The hard fence of one rank; its front gives up everything on its way."""
        self.dice.choice(self.net.into).tell(rebuild=plan_pb2.RebuildAgent())
        self.net.turn()
        for transfer_id in sorted(self.open):
            self._give_up(transfer_id)

    def answer_what_is_missing(self) -> None:
        for node in self.net.into:
            for missing in node.heard("missing"):
                if missing.transfer_id in self.open:
                    command = plan_pb2.ResendTransferRecords(
                        transfer_id=missing.transfer_id, missing=missing.missing
                    )
                    for sender in self.net.out:
                        sender.tell(resend=command)
            node.said = [status for status in node.said if not status.HasField("missing")]

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

    def check(self) -> None:
        failed = {f.transfer_id for node in self.net.out for f in node.heard("failed")}
        for transfer_id in sorted(self.open & failed):
            self._give_up(transfer_id)
        self.bytes_change_only_where_a_transfer_is_open()
        self.what_has_arrived_is_complete_and_what_is_quiet_is_closed()

    def bytes_change_only_where_a_transfer_is_open(self):
        for rank, frozen in zip(self.net.receivers, self.frozen, strict=True):
            for name, pool in rank.pools.items():
                changed = set(np.nonzero((pool != frozen[name]).any(axis=1))[0].tolist())
                assert changed <= self._writable(name), f"{name}: {changed} changed"

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

    def end(self) -> None:
        """Everything that is still open is aborted and becomes quiet; then a fresh transfer works."""
        for transfer_id in self.open:
            self._give_up(transfer_id)
        self.net.run(QUIET_S)
        for transfer_id in self.open:
            assert self._everywhere(self.net.out, "quiet", transfer_id), f"{transfer_id} not quiet"
        self.check()
        self.is_fair = True
        self.reconnect()
        self.begin()
        last = self.next_id - 1
        while self.sendings[last].n_copied < self.sendings[last].n_pages:
            self.copy()
        self.finish_step()
        self.net.until(lambda: self._everywhere(self.net.into, "arrived", last))
        self._assert_complete(self.sendings[last])


@pytest.mark.parametrize("seed", range(N_STORIES))
def test_a_story_of_transfers_keeps_the_laws(seed):
    Story(seed).tell()
