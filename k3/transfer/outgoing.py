"""The sending side of a mover: transfers, their pieces, the handles in flight, proof of quiet.

A transfer is open until its last pieces are out (sent) or it fails or is aborted (ending). An ending transfer posts
nothing more; its posted handles are polled until each has ended, and only then is it quiet. Handles that do not end
within `drain_s` cannot be stopped except by destroying the agent: `must_rebuild` asks the mover for that.
Every status is put into `statuses`; time is an argument. Every exit of a transfer leaves a tombstone, so that a command
that was on its way cannot bring it back.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace

from k3.config.tree import TransferConfig
from k3.transfer.agent import PeerLost, TransferAgent, WriteFailed
from k3.transfer.flight import Flight, Piece, State, Transfer
from k3.transfer.peers import Peer, Peers
from k3.transfer.pieces import Share, destination_problem, draft_shares, shares
from k3.transfer.record import Kind, Record
from k3.v1 import plan_pb2, prefill_pb2

log = logging.getLogger("k3.transfer")

Status = plan_pb2.TransferStatus
MAX_REPOSTS = 2
MAX_TOMBSTONES = 16_384
MAX_SENT = 1_024
POST_BYTES = (
    32 << 20
)  # per turn from host memory: a post may copy inside the call, and commands must not wait
PROGRESS_S = 0.1
RAISED_QUIET_S = 5.0  # GPU memory behind RDMA: a handle that raised may still land for this long


class Outgoing:
    """Transfers of one sender rank."""

    def __init__(self, peers: Peers, config: TransferConfig, agent: TransferAgent) -> None:
        self._peers = peers
        self._config = config
        self._agent = agent
        self._flight = Flight(config, agent)
        self._transfers: dict[int, Transfer] = {}
        self._sent: OrderedDict[int, None] = OrderedDict()
        self._tombstones: OrderedDict[int, None] = OrderedDict()
        self._completed_step = 0
        self.statuses: list[Status] = []
        self.bytes_total = 0
        self.must_rebuild = False
        has_gpu = any(region.memory == "VRAM" for region in agent.regions)
        self._raised_pause_s = RAISED_QUIET_S if has_gpu else 0.0
        self._post_bytes = config.bytes_in_flight if has_gpu else POST_BYTES

    # ------------------------------------------------------------------ what the mover asks

    @property
    def n_zombies(self) -> int:
        """Posted handles whose transfer is ending."""
        return self._flight.n_zombies

    @property
    def is_waiting_for_step(self) -> bool:
        """Whether pieces wait for a step that is not complete."""
        return any(not self._is_complete(piece) for _, piece in self._next())

    @property
    def has_ready(self) -> bool:
        """Whether pieces could be posted but for the limits."""
        return any(self._is_complete(piece) for _, piece in self._next())

    @property
    def can_post(self) -> bool:
        """Whether the next turn posts more."""
        return any(self._may_go(transfer, piece) for transfer, piece in self._next())

    @property
    def is_idle(self) -> bool:
        """Whether nothing changes before the next command."""
        return not (len(self._flight) or self._ending() or self._peers.is_waiting or self.has_ready)

    def _next(self) -> Iterator[tuple[Transfer, Piece]]:
        """The first piece of every queue."""
        for transfer in self._transfers.values():
            yield from ((transfer, queue[0]) for queue in transfer.queues.values() if queue)

    def _is_complete(self, piece: Piece) -> bool:
        return piece.after_step <= self._completed_step

    def _may_go(self, transfer: Transfer, piece: Piece) -> bool:
        return self._is_complete(piece) and self._flight.has_room(transfer, piece)

    def step_completed(self, step_id: int) -> None:
        """Everything up to this step is in memory."""
        self._completed_step = max(self._completed_step, step_id)

    def turn(self, now: float) -> bool:
        """Poll, post, report. Returns whether a handle ended or was posted."""
        has_ended, n_live = self._poll(now), len(self._flight)
        self._post(now)
        self._finish(now)
        self._peers.sweep(self._agent, now)
        self.statuses += self._peers.connect_waiting(self._agent, now)
        return has_ended or len(self._flight) > n_live

    def reset(self, agent: TransferAgent, why: str, now: float) -> None:
        """The old agent is destroyed, so everything it posted is quiet; its transfers fail and their peers are gone."""
        for transfer in list(self._transfers.values()):
            self._end(transfer, "stalled", why, now, is_peer_lost=True)
        for transfer_id, transfer in self._transfers.items():
            if transfer.state is State.ENDING:
                self._quiet(transfer_id)
        self._transfers.clear()
        self._sent.clear()
        self._peers.clear()
        self._agent = agent
        self._flight = Flight(self._config, agent)
        self.must_rebuild = False

    # ------------------------------------------------------------------ commands

    def connect(self, command: plan_pb2.ConnectPeer, now: float) -> None:
        """Answered by PeerConnected, after outdated agents of the same instance are gone."""
        outdated = self._peers.ask(command)
        if outdated is not None:
            self._lose(outdated, "replaced by new agents of the same instance", now)

    def drop(self, peer_id: str, now: float) -> None:
        """Forget a peer, also one that is yet to be connected; its transfers fail."""
        self._peers.take_back(peer_id)
        peer = self._peers.known.get(peer_id)
        if peer is not None:
            self._lose(peer, "dropped", now)

    def start(self, command: plan_pb2.StartTransfer) -> None:
        """Open a transfer, or answer TransferFailed at once."""
        transfer_id = command.transfer_id
        assert transfer_id not in self._transfers, f"transfer {transfer_id:#x} started twice"
        peer = self._peers.known.get(command.peer_id)
        if transfer_id in self._tombstones:
            self._refuse(transfer_id, "it was aborted before it started")
        elif peer is None or peer.is_lost:
            self._refuse(transfer_id, f"peer {command.peer_id!r} is not connected", peer_lost=True)
        elif problem := destination_problem(command, peer, self._peers.layout.page_tokens):
            self._refuse(transfer_id, problem)
        else:
            lists = {one.rank: tuple(one.pages) for one in command.destination.rank_pages}
            common = tuple(command.destination.pages)
            self._transfers[transfer_id] = Transfer(
                command,
                peer,
                pages={receiver: lists.get(receiver, common) for receiver in peer.links},
                queues={receiver: deque() for receiver in peer.links},
                records={receiver: [] for receiver in peer.links},
                draft_records={receiver: [] for receiver in peer.links},
            )

    def copy(self, command: plan_pb2.CopyPages) -> None:
        """Queue this rank's share of pages, and with `last` of the state. Ignored for transfers that ended."""
        transfer = self._transfers.get(command.transfer_id)
        if transfer is None or transfer.state is not State.OPEN:
            return
        assert not transfer.has_last, f"transfer {command.transfer_id:#x}: pages after the last"
        n_pages = -(-transfer.start.prompt_len // self._peers.layout.page_tokens)
        assert command.first_page + len(command.pages) <= n_pages, (
            f"transfer {command.transfer_id:#x}: pages {command.first_page}.."
            f"{command.first_page + len(command.pages) - 1} of a prompt of {n_pages}"
        )
        has_target = set(transfer.peer.pair.receivers(self._peers.rank, n_pages))
        for receiver in transfer.peer.links:
            self._queue_draft(
                transfer, receiver, command
            )  # first: the target's last record ends the wait
            if receiver in has_target:
                self._queue(transfer, receiver, command)
        transfer.has_last = command.last

    def abort(self, transfer_id: int, now: float) -> None:
        """Stop posting; TransferQuiet follows when every posted handle has ended. Idempotent."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._quiet(transfer_id)
        elif transfer.state is not State.ENDING:
            self._begin_ending(transfer, now)

    def resend(self, command: plan_pb2.ResendTransferRecords, now: float) -> None:
        """Send records again, without bytes. While bytes are on their way their records come on their own."""
        transfer = self._transfers.get(command.transfer_id)
        if transfer is None:
            self._refuse(command.transfer_id, "its records are not known any more")
            return
        if transfer.state is not State.SENT:
            return
        for missing in command.missing:
            if missing.sender != self._peers.rank:
                continue
            records = transfer.records.get(missing.receiver, [])
            for seq in missing.seqs or range(len(records)):
                if seq < len(records) and not transfer.peer.is_lost:
                    self._notify(transfer, missing.receiver, records[seq], now)

    # ------------------------------------------------------------------ one turn

    def _poll(self, now: float) -> bool:
        """Take what ended and give up what is overdue. Returns whether something ended."""
        ended = self._flight.poll()
        for transfer, piece, error in ended:
            if error is not None:
                self._failed(transfer, piece, error, now)
            elif piece.share is not None:
                pool = piece.share.link.rows.pool
                transfer.pool_bytes[pool] = transfer.pool_bytes.get(pool, 0) + piece.n_bytes
                transfer.bytes_done += piece.n_bytes
                self.bytes_total += piece.n_bytes
        for transfer, piece in self._flight.overdue(now):
            message = f"a write of {piece.n_bytes} bytes to rank {piece.receiver} did not end"
            self._end(transfer, "stalled", f"{message} within its deadline", now)
        return bool(ended)

    def _post(self, now: float) -> None:
        budget = self._post_bytes
        for transfer in list(self._transfers.values()):
            for receiver, queue in transfer.queues.items():
                while queue and budget > 0 and self._may_go(transfer, queue[0]):
                    piece = queue.popleft()
                    budget -= piece.n_bytes
                    if piece.share is None:
                        self._notify(transfer, receiver, piece.record, now)
                        continue
                    try:
                        self._flight.post(transfer, piece, piece.share, now)
                    except (PeerLost, WriteFailed) as error:
                        self._failed(transfer, piece, error, now)

    def _notify(self, transfer: Transfer, receiver: int, record: Record, now: float) -> None:
        """A record alone: the last one of a receiver without data in the last copy, or one asked for again."""
        is_again = transfer.state is State.SENT
        sent = replace(record, kind=Kind.AGAIN) if is_again else record
        try:
            self._agent.notify(transfer.peer.agents[receiver], sent.pack())
        except (PeerLost, WriteFailed) as error:
            self._lose(transfer.peer, str(error), now)

    def _finish(self, now: float) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.state is State.OPEN:
                if transfer.is_out and now >= transfer.quiet_not_before:
                    self._all_sent(transfer, now)
                elif transfer.bytes_done > transfer.bytes_told:
                    self._tell_progress(transfer, now)
            elif transfer.state is State.ENDING:
                if transfer.n_live == 0 and now >= transfer.quiet_not_before:
                    del self._transfers[transfer.transfer_id]
                    self._quiet(transfer.transfer_id)
                elif transfer.n_live and now > transfer.drain_until:
                    self.must_rebuild = True

    # ------------------------------------------------------------------ changes of one transfer

    def _queue(self, transfer: Transfer, receiver: int, command: plan_pb2.CopyPages) -> None:
        found: list[Share | None] = list(
            shares(
                transfer.peer,
                self._peers.rank,
                receiver,
                command,
                transfer.pages[receiver],
                transfer.start.destination.state_slot,
                self._share_bytes,
            )
        )
        if command.last and not found:
            found.append(None)
        transfer.append(self._peers.rank, receiver, command, found, is_draft=False)

    def _queue_draft(self, transfer: Transfer, receiver: int, command: plan_pb2.CopyPages) -> None:
        page_tokens = self._peers.layout.page_tokens
        found = draft_shares(
            transfer.peer, receiver, command, transfer.start, page_tokens, self._share_bytes
        )
        transfer.append(self._peers.rank, receiver, command, list(found), is_draft=True)

    @property
    def _share_bytes(self) -> int:
        return self._config.bytes_in_flight // self._config.handles_in_flight

    def _failed(
        self, transfer: Transfer, piece: Piece, error: PeerLost | WriteFailed, now: float
    ) -> None:
        """Post a failed write again, with the same sequence number; the peer is lost when that does not help.

        What raised may still land for a while: until then the transfer is neither quiet nor complete, because decode
        writes into the same pages once it has them.
        """
        transfer.quiet_not_before = now + self._raised_pause_s
        if isinstance(error, PeerLost):
            self._lose(transfer.peer, str(error), now)
        elif piece.record.repost >= MAX_REPOSTS:
            self._lose(transfer.peer, f"{error} (posted {MAX_REPOSTS + 1} times)", now)
        elif transfer.state is State.OPEN:
            piece.record = replace(piece.record, repost=piece.record.repost + 1)
            records = transfer.numbered(piece.receiver, is_draft=piece.record.is_draft)
            records[piece.record.seq] = piece.record
            transfer.queues[piece.receiver].appendleft(piece)

    def _all_sent(self, transfer: Transfer, now: float) -> None:
        self._tell_progress(transfer, now, is_due=True)
        transfer.state = State.SENT
        transfer_id = transfer.transfer_id
        totals = [
            prefill_pb2.RecordTotal(
                sender=self._peers.rank,
                receiver=receiver,
                records=len(records),
                draft_records=len(transfer.draft_records[receiver]),
            )
            for receiver, records in transfer.records.items()
            if records or transfer.draft_records[receiver]
        ]
        sent = plan_pb2.TransferSent(
            transfer_id=transfer_id, totals=totals, bytes=transfer.pool_bytes
        )
        self.statuses.append(Status(sent=sent))
        self._sent[transfer_id] = None
        if len(self._sent) > MAX_SENT:
            oldest, _none = self._sent.popitem(last=False)
            self._transfers.pop(oldest, None)
            self._bury(oldest)

    def _tell_progress(self, transfer: Transfer, now: float, *, is_due: bool = False) -> None:
        if not is_due and now - transfer.told_at < PROGRESS_S:
            return
        transfer.bytes_told, transfer.told_at = transfer.bytes_done, now
        progress = plan_pb2.TransferProgress(
            transfer_id=transfer.transfer_id, bytes_done=transfer.bytes_done
        )
        self.statuses.append(Status(progress=progress))

    def _lose(self, peer: Peer, message: str, now: float) -> None:
        """The peer as a whole: its open transfers fail, it is forgotten once its handles have ended."""
        if not peer.is_lost:
            peer.is_lost = True
            log.warning("lost peer %s: %s", peer.peer_id, message)
        for transfer in self._transfers.values():
            if transfer.peer is peer:
                self._end(transfer, "peer_lost", message, now, is_peer_lost=True)

    def _end(
        self,
        transfer: Transfer,
        reason: str,
        message: str,
        now: float,
        *,
        is_peer_lost: bool = False,
    ) -> None:
        """Fail an open transfer; TransferQuiet follows."""
        if transfer.state is not State.OPEN:
            return
        self._begin_ending(transfer, now)
        failed = plan_pb2.TransferFailed(
            transfer_id=transfer.transfer_id,
            reason=reason,
            message=message,
            peer_lost=is_peer_lost,
        )
        self.statuses.append(Status(failed=failed))

    def _begin_ending(self, transfer: Transfer, now: float) -> None:
        transfer.state = State.ENDING
        transfer.drain_until = now + self._config.drain_s
        self._sent.pop(transfer.transfer_id, None)
        for queue in transfer.queues.values():
            queue.clear()

    def _refuse(self, transfer_id: int, why: str, *, peer_lost: bool = False) -> None:
        """Fail a transfer that was never open; nothing was posted for it, so it is quiet too."""
        failed = plan_pb2.TransferFailed(
            transfer_id=transfer_id,
            reason="peer_lost" if peer_lost else "refused",
            message=f"transfer {transfer_id:#x} is refused: {why}",
            peer_lost=peer_lost,
        )
        self.statuses.append(Status(failed=failed))
        self._quiet(transfer_id)

    def _quiet(self, transfer_id: int) -> None:
        self._bury(transfer_id)
        quiet = plan_pb2.TransferQuiet(transfer_id=transfer_id)
        self.statuses.append(Status(quiet=quiet))

    def _bury(self, transfer_id: int) -> None:
        self._tombstones[transfer_id] = None
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _ending(self) -> bool:
        return any(transfer.state is State.ENDING for transfer in self._transfers.values())
