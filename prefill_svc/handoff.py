"""How a computed prompt leaves: one `Export` per request, from its acceptance to the release of its memory.

Pages go out as plans complete them; the ranks' movers wait for the step named in each copy. A write that was posted
cannot be called back, so whatever ends early is drained: every rank must prove that it is quiet before `Quiesced` is
said and before source pages are reused. If a rank cannot prove it in time, the request ends without `Quiesced`, its
destination stays in quarantine at decode, and `Quiesce` answers "still draining" until the proof arrives.
No sockets here: ranks and streams are callables, time is a clock. Every end runs through `_end`, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from k3.config.tree import TransferConfig
from k3.errors import (
    DeadlineExceeded,
    K3Error,
    QueueFull,
    RequestAborted,
    RequestRejected,
    TransferError,
    Unavailable,
)
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc.core.scheduler import Chunk
from prefill_svc.destination import check_destination
from prefill_svc.export import Export, Phase, Prompts, Stream
from prefill_svc.peers import Peer, Peers, SendCommand
from prefill_svc.quiet import QuietBook


@dataclass(slots=True)
class Handoff:
    """All exports of one incarnation of the rank group."""

    peers: Peers
    prompts: Prompts
    command: SendCommand
    clock: Callable[[], float]
    times: TransferConfig
    reserve_wait_s: float
    n_ranks: int
    page_tokens: int
    on_end: Callable[[Export], None]
    _exports: dict[int, Export] = field(default_factory=dict[int, Export])
    _by_transfer: dict[int, Export] = field(default_factory=dict[int, Export])
    _quiet: QuietBook = field(init=False)

    def __post_init__(self) -> None:
        self._quiet = QuietBook(self.times.lease_s)

    # ------------------------------------------------------------ computing

    def open(self, key: int, peer: Peer, prompt_len: int, stream: Stream) -> Export:
        """Begin to look after a request."""
        export = Export(key, peer, prompt_len, stream)
        self._exports[key] = export
        self.peers.acquire(peer)
        return export

    def planned(self, step_id: int, chunks: Iterable[Chunk]) -> None:
        """A plan was sent to the ranks: what it completes goes out after it."""
        for chunk in chunks:
            export = self._exports.get(chunk.key)
            if export is None:
                continue
            export.planned, export.last_step = chunk.end, step_id
            export.pages, export.slot = chunk.pages, chunk.write_slot
            if export.phase is Phase.OPEN:
                self._push(export)

    def computed(self, key: int, tokens: int) -> None:
        """A chunk of the request was acknowledged."""
        export = self._exports.get(key)
        if export is not None:
            export.computed = tokens

    def tell(self, key: int, response: prefill_pb2.PrefillResponse) -> None:
        """Pass a message on to the request's stream, unless it is ending."""
        export = self._exports.get(key)
        if export is not None and export.phase is not Phase.DRAINING:
            export.stream.send(response)

    def prefilled(self, key: int, message: prefill_pb2.Prefilled) -> None:
        """The first token is drawn; it goes out before the last bytes do."""
        export = self._exports.get(key)
        if export is None or export.phase not in (Phase.COMPUTING, Phase.OPEN):
            return
        export.prefilled, export.prefilled_at = message, self.clock()
        export.stream.send(prefill_pb2.PrefillResponse(prefilled=message))
        self._commit_if_complete(export)

    # ------------------------------------------------------------ from decode

    def receive(self, export: Export, message: prefill_pb2.PrefillRequest) -> None:
        """A message of the stream that is not the first. Faults of the caller end the request."""
        if export.phase in (Phase.DRAINING, Phase.ENDED):
            return
        match message.WhichOneof("message"):
            case "destination":
                self._on_destination(export, message.destination)
            case "heartbeat_echo":
                export.last_echo_at = self.clock()
            case "resend_records":
                self._resend(export, message.resend_records)
            case "abort":
                self._drain(export, None)
            case "received":
                self._on_received(export, message.received)
            case other:
                text = f"message {other!r} is not expected after Start"
                self._drain(export, RequestRejected(text, param="message"))

    def lost(self, export: Export, why: K3Error | None = None) -> None:
        """Nothing more comes over the stream: as an abort. why: None where nobody can be told."""
        if export.phase not in (Phase.DRAINING, Phase.ENDED):
            self._drain(export, why or RequestAborted("the stream was lost"))

    def quiesce(self, request: prefill_pb2.QuiesceRequest) -> list[prefill_pb2.QuiesceState]:
        """State of transfers whose stream was lost, in the order asked; running ones are aborted."""
        return [self._quiesce_one(transfer_id, request) for transfer_id in request.transfer_ids]

    # ------------------------------------------------------------ from ranks

    def on_status(self, rank: int, status: plan_pb2.TransferStatus) -> None:
        """A mover reports. Reports about transfers nobody knows are late and mean nothing."""
        match status.WhichOneof("status"):
            case "progress":
                export = self._by_transfer.get(status.progress.transfer_id)
                if export is not None:
                    export.bytes_done[rank] = status.progress.bytes_done
            case "sent":
                export = self._by_transfer.get(status.sent.transfer_id)
                if export is not None and export.phase is Phase.OPEN:
                    export.sent[rank] = status.sent
                    export.bytes_done[rank] = sum(status.sent.bytes.values())
                    self._commit_if_complete(export)
            case "failed":
                self._on_failed(rank, status.failed)
            case "quiet":
                self._on_quiet(rank, status.quiet.transfer_id)
            case "peer_connected":
                self.peers.on_connected(rank, status.peer_connected)
            case "ready":
                self._on_new_agent(rank)
            case _:
                pass  # heartbeats are the group's matter; arrivals belong to receivers

    # ------------------------------------------------------------ time

    def tick(self) -> None:
        """Heartbeats and deadlines; call it several times per heartbeat."""
        now = self.clock()
        for export in tuple(self._exports.values()):
            self._tick(export, now)
        self._quiet.expire(now)

    def fail_all(self, error: K3Error) -> None:
        """The rank group is gone, and all posted writes with it: end every request at once."""
        for export in tuple(self._exports.values()):
            self._end(export, error)
        self._quiet.forget_proofs()

    def abort_all(self, error: K3Error) -> None:
        """End every request, draining what was posted."""
        for export in tuple(self._exports.values()):
            self._drain(export, error)

    @property
    def n_open(self) -> int:
        """Requests not ended."""
        return len(self._exports)

    @property
    def n_transfers(self) -> int:
        """Requests with a destination."""
        return len(self._by_transfer)

    # ------------------------------------------------------------ steps

    def _on_destination(self, export: Export, destination: prefill_pb2.Destination) -> None:
        transfer_id = destination.transfer_id
        if self._quiet.is_over(transfer_id) or self._quiet.is_draining(transfer_id):
            text = f"transfer {transfer_id:#x} was given up before its destination came"
            self._drain(export, RequestAborted(text, code="fenced"))
            return
        if export.destination is not None or transfer_id in self._by_transfer:
            text = (
                f"transfer {transfer_id:#x}: a stream has one destination, and an id is used once"
            )
            self._drain(export, RequestRejected(text, param="destination.transfer_id"))
            return
        try:
            check_destination(
                destination,
                export.peer.geometry,
                page_tokens=self.page_tokens,
                prompt_len=export.prompt_len,
                least_lease_s=self.times.self_fence_s + self.times.drain_s,
            )
        except RequestRejected as error:
            self._drain(export, error)
            return
        export.destination = destination
        export.phase = Phase.OPEN
        self._by_transfer[transfer_id] = export
        now = self.clock()
        export.opened_at = export.last_echo_at = now
        export.next_heartbeat_at = now + self.times.heartbeat_s
        start = plan_pb2.StartTransfer(
            transfer_id=transfer_id,
            nonce=destination.nonce,
            peer_id=export.peer.peer_id,
            destination=destination,
            prompt_len=export.prompt_len,
            send_draft=export.sends_draft,
        )
        self._to_all(plan_pb2.TransferCommand(start=start))
        self._push(export)

    def _push(self, export: Export) -> None:
        """Order the copy of every page that is complete after the newest plan and was not ordered yet."""
        copy = export.next_copy(self.page_tokens)
        if copy is not None:
            export.n_copied += len(copy.pages)
            self._to_all(plan_pb2.TransferCommand(copy=copy))

    def _commit_if_complete(self, export: Export) -> None:
        if export.phase is not Phase.OPEN or export.prefilled_at is None:
            return
        if len(export.sent) < self.n_ranks:
            return
        export.phase, export.committed_at = Phase.COMMITTED, self.clock()
        export.stream.send(prefill_pb2.PrefillResponse(committed=export.commitment()))

    def _resend(self, export: Export, request: prefill_pb2.ResendRecords) -> None:
        if export.phase is not Phase.COMMITTED:
            text = "ResendRecords is only meaningful after Committed"
            self._drain(export, RequestRejected(text, param="resend_records"))
            return
        by_rank: dict[int, list[prefill_pb2.MissingRecords]] = {}
        for missing in request.missing:
            by_rank.setdefault(missing.sender, []).append(missing)
        unknown = [rank for rank in by_rank if rank >= self.n_ranks]
        if unknown:
            text = f"senders {unknown} do not exist; this instance has ranks 0..{self.n_ranks - 1}"
            self._drain(export, RequestRejected(text, param="resend_records.missing.sender"))
            return
        for rank, records in by_rank.items():
            resend = plan_pb2.ResendTransferRecords(transfer_id=export.transfer_id, missing=records)
            self.command(rank, plan_pb2.TransferCommand(resend=resend))

    def _on_received(self, export: Export, received: prefill_pb2.Received) -> None:
        if export.phase is not Phase.COMMITTED or received.generation != export.generation:
            text = f"Received for generation {received.generation}, expected {export.generation} after Committed"
            self._drain(export, RequestRejected(text, param="received.generation"))
            return
        self._abort_transfer(export)  # nothing is posted any more: lets the movers forget it
        self._end(export, None)

    def _on_failed(self, rank: int, failed: plan_pb2.TransferFailed) -> None:
        export = self._by_transfer.get(failed.transfer_id)
        if export is None:
            return
        text = f"rank {rank} could not write to {export.peer.instance_id}: {failed.message}"
        kind, code = TransferError, f"transfer_{failed.reason}"
        if failed.peer_lost:
            kind, code = Unavailable, "peer_lost"
        self._drain(export, kind(text, code=code))
        if failed.peer_lost:
            self._lose_peer(export.peer, failed.message)

    def _lose_peer(self, peer: Peer, why: str) -> None:
        self.peers.lose(peer, why)
        lost = Unavailable(f"decode instance {peer.instance_id} was lost: {why}", code="peer_lost")
        for export in tuple(self._exports.values()):
            if export.peer is peer:
                self._drain(export, lost)

    def _on_new_agent(self, rank: int) -> None:
        """A mover built a new agent: its old one is gone with all it had posted, and knows no peer."""
        why = f"rank {rank} built a new transfer agent"
        for peer in self.peers.all():
            self._lose_peer(peer, why)
        for transfer_id in (*self._by_transfer, *self._quiet.draining()):
            self._on_quiet(rank, transfer_id)

    def _drain(self, export: Export, error: K3Error | None) -> None:
        """End a request early: compute nothing more, stop posting, wait until every rank is quiet."""
        if export.phase in (Phase.DRAINING, Phase.ENDED):
            return
        self.prompts.abort(export.key)
        export.error = error
        if export.destination is None:
            self._say_quiesced(export)
            self._end(export, error)
            return
        export.phase = Phase.DRAINING
        export.drain_until = self.clock() + self.times.drain_s
        self._abort_transfer(export)

    def _abort_transfer(self, export: Export) -> None:
        """Tell all movers to stop; each answers once nothing posted is left."""
        self._quiet.owe(export.transfer_id, range(self.n_ranks))
        abort = plan_pb2.AbortTransfer(transfer_id=export.transfer_id)
        self._to_all(plan_pb2.TransferCommand(abort=abort))

    def _on_quiet(self, rank: int, transfer_id: int) -> None:
        if not self._quiet.prove(transfer_id, rank, self.clock()):
            return
        export = self._by_transfer.get(transfer_id)
        if export is not None and export.phase is Phase.DRAINING:
            self._say_quiesced(export)
            self._end(export, export.error)

    def _say_quiesced(self, export: Export) -> None:
        quiesced = prefill_pb2.Quiesced(generation=export.generation)
        export.stream.send(prefill_pb2.PrefillResponse(quiesced=quiesced))

    def _end(self, export: Export, error: K3Error | None) -> None:
        """The one end of every request: memory, peer and stream are let go. Idempotent."""
        if export.phase is Phase.ENDED:
            return
        export.phase, export.error = Phase.ENDED, error
        del self._exports[export.key]
        if export.destination is not None:
            del self._by_transfer[export.transfer_id]
            if not self._quiet.is_draining(export.transfer_id):
                self._quiet.bury(export.transfer_id, self.clock())
        if error is not None:
            self.prompts.abort(export.key)
        self.prompts.release(export.key)
        self.peers.release(export.peer)
        export.stream.finish(error)
        self.on_end(export)

    def _quiesce_one(
        self, transfer_id: int, request: prefill_pb2.QuiesceRequest
    ) -> prefill_pb2.QuiesceState:
        export = self._by_transfer.get(transfer_id)
        if export is not None:
            if export.peer.instance_id != request.instance_id:
                return prefill_pb2.QUIESCE_STATE_UNSPECIFIED  # not the caller's to end
            self.lost(export)
        if self._quiet.is_draining(transfer_id):
            return prefill_pb2.QUIESCE_STATE_STILL_DRAINING
        if self._quiet.is_over(transfer_id):
            return prefill_pb2.QUIESCE_STATE_QUIESCED
        if request.prefill_instance_id != self.peers.identity.instance_id:
            return prefill_pb2.QUIESCE_STATE_UNSPECIFIED
        self._quiet.bury(transfer_id, self.clock())
        return prefill_pb2.QUIESCE_STATE_QUIESCED

    def _tick(self, export: Export, now: float) -> None:
        match export.phase:
            case Phase.COMPUTING:
                if (
                    export.prefilled_at is not None
                    and now - export.prefilled_at >= self.reserve_wait_s
                ):
                    text = f"no destination within {self.reserve_wait_s:g} s after the first token"
                    self._end(export, QueueFull(text, code="reserve_wait"))
            case Phase.OPEN | Phase.COMMITTED:
                self._tick_transfer(export, now)
            case Phase.DRAINING:
                if now >= export.drain_until:
                    ranks = self._quiet.owing(export.transfer_id)
                    text = f"ranks {ranks} are not quiet {self.times.drain_s:g} s after the end"
                    self._end(export, export.error or DeadlineExceeded(text, code="not_quiet"))
            case Phase.ENDED:
                pass

    def _tick_transfer(self, export: Export, now: float) -> None:
        times = self.times
        if now - export.last_echo_at >= times.self_fence_s:
            text = f"no heartbeat echo for {times.self_fence_s:g} s from {export.peer.instance_id}"
            self._drain(export, Unavailable(text, code="self_fence"))
            return
        if export.committed_at is not None:
            if now - export.committed_at >= times.lease_s:
                text = f"no Received within {times.lease_s:g} s after Committed"
                self._drain(export, DeadlineExceeded(text, code="not_received"))
                return
        elif (
            export.prefilled_at is not None and now - export.tail_since >= times.transfer_deadline_s
        ):
            text = f"the transfer is not complete {times.transfer_deadline_s:g} s after the first token"
            self._drain(export, TransferError(text, code="transfer_stalled"))
            return
        if now >= export.next_heartbeat_at:
            export.next_heartbeat_at = now + times.heartbeat_s
            export.seq += 1
            export.stream.send(prefill_pb2.PrefillResponse(progress=export.progress()))

    def _to_all(self, command: plan_pb2.TransferCommand) -> None:
        for rank in range(self.n_ranks):
            self.command(rank, command)
