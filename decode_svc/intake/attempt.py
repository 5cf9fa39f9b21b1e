"""One candidate's try at one request: a `Prefill` stream from Start to Received, with decode's clocks.

An attempt is an actor: stream, movers and admission put what happened into its inbox, `run` takes it out one by one
until every byte is in place or something is wrong. Whatever the end, `close` finishes the stream properly and says
whether the destination is proven quiet; it runs after `run`, in a task of its own, because memory outlives requests.

Clocks: `lease` without a word, `progress_timeout` without bytes although the prompt is computed, `transfer_deadline`
after the first token, `resend_after` for records missing after Committed. All on the loop's monotonic clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from decode_svc.intake.source import Ended, Heard, Pair, PrefillCall
from decode_svc.request import DecodeRequest
from k3.config.tree import TransferConfig
from k3.errors import (
    DeadlineExceeded,
    K3Error,
    LayoutMismatch,
    QueueFull,
    ReconnectRequired,
    RequestRejected,
    TransferError,
)
from k3.v1 import plan_pb2, prefill_pb2

ToPrefill = prefill_pb2.PrefillRequest
REFUSALS = (RequestRejected, QueueFull, LayoutMismatch, ReconnectRequired)
DRAFT_PATIENCE_S = 0.05
INBOX_LIMIT = 4096  # heartbeats every 2 s and a few per rank: reached only by a broken peer


@dataclass(frozen=True, slots=True)
class Target:
    """A destination as prefill is told, and which senders each of our ranks waits for."""

    message: prefill_pb2.Destination
    senders: tuple[tuple[int, ...], ...]
    draft_senders: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """The request was admitted: a destination can be named."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Every expected record is in on a rank; has_drafts: those of draft rows too."""

    rank: int
    has_drafts: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """Records a rank has not seen."""

    rank: int
    records: tuple[prefill_pb2.MissingRecords, ...]


@dataclass(frozen=True, slots=True)
class Fenced:
    """Our agents are being rebuilt: nothing more can arrive."""


Item = Heard | Ended | Reserved | Arrived | Missing | Fenced


@dataclass(slots=True)
class Hooks:
    """What an attempt may do to the rest of the service."""

    destination: Callable[[DecodeRequest, Pair], Target]  # names the reservation
    expect: Callable[[Target], Awaitable[None]]  # ranks begin to expect a transfer
    forget: Callable[[int], Awaitable[None]]  # ranks stop expecting a transfer
    first_token: Callable[
        [DecodeRequest, Pair, prefill_pb2.Prefilled], bool
    ]  # True: it ends the request
    ends_at_once: Callable[[DecodeRequest, prefill_pb2.Prefilled], bool]


@dataclass(slots=True)
class Attempt:
    """See the module's docstring. `start` is the first message."""

    request: DecodeRequest
    pair: Pair
    start: prefill_pb2.Start
    times: TransferConfig
    hooks: Hooks
    inbox: asyncio.Queue[Item] = field(default_factory=lambda: asyncio.Queue(INBOX_LIMIT))
    call: PrefillCall | None = None
    target: Target | None = None
    accepted: bool = False
    quiesced: bool = False
    is_over: bool = False  # the stream has ended
    committed: bool = False  # the first token has gone out
    stopped: bool = False  # ... and it ended the request
    _prefilled: prefill_pb2.Prefilled | None = None
    _commit: prefill_pb2.Committed | None = None
    _arrived: set[int] = field(default_factory=set[int])
    _has_drafts: set[int] = field(default_factory=set[int])
    _drafts_until: float | None = None
    _missing: dict[int, tuple[prefill_pb2.MissingRecords, ...]] = field(
        default_factory=dict[int, tuple[prefill_pb2.MissingRecords, ...]]
    )
    _bytes_done: int = 0
    _heard_at: float = 0.0
    _grown_at: float | None = None  # None while the prompt is not computed
    _tail_at: float | None = None
    _resend_at: float | None = None

    def deliver(self, item: Item) -> None:
        """Put something into the inbox; a peer that floods it loses the call, and that is the last thing heard."""
        if not self.inbox.full():
            self.inbox.put_nowait(item)
            return
        while not self.inbox.empty():
            self.inbox.get_nowait()
        text = f"{INBOX_LIMIT} messages of prefill wait to be read; it floods its stream"
        self.inbox.put_nowait(Ended(TransferError(text)))
        if self.call is not None:
            self.call.cancel()

    @property
    def transfer_id(self) -> int | None:
        """Id of the destination, once one was named."""
        return None if self.target is None else self.target.message.transfer_id

    # ---------------------------------------------------------------- up to the last byte

    async def run(self, call: PrefillCall) -> None:
        """Return when every byte is in place, or when the first token ended the request (`stopped`).

        Raises K3Error: prefill's own words, or a clock of ours.
        """
        self.call = call
        self._heard_at = _now()
        await self._say(ToPrefill(start=self.start))
        if self.request.reservation is not None:
            await self._name_destination()
        while not self._is_complete():
            try:
                async with asyncio.timeout_at(self._next_deadline()):
                    item = await self.inbox.get()
            except TimeoutError:
                await self._on_deadline()
                continue
            await self._take(item)
            if self.stopped:
                return
        assert self.target is not None
        generation = self.target.message.generation
        await self._say(ToPrefill(received=prefill_pb2.Received(generation=generation)))

    async def _take(self, item: Item) -> None:
        match item:
            case Heard(message):
                await self._on_message(message)
            case Ended(error):
                self.is_over = True
                if error is None:
                    error = TransferError(
                        "prefill closed the stream before the transfer was complete"
                    )
                raise error
            case Reserved():
                if self.target is None:
                    await self._name_destination()
            case Arrived(rank, has_drafts):
                self._arrived.add(rank)
                if has_drafts:
                    self._has_drafts.add(rank)
                self._missing.pop(rank, None)
            case Missing(rank, records):
                self._missing[rank] = records
            case Fenced():
                raise ReconnectRequired("the transfer agents of this instance were rebuilt")

    async def _on_message(self, message: prefill_pb2.PrefillResponse) -> None:
        now = _now()
        self._heard_at = now
        match message.WhichOneof("message"):
            case "accepted":
                self.accepted = True
            case "progress":
                await self._on_progress(message.progress, now)
            case "prefilled":
                self._prefilled = message.prefilled
                self._on_prefilled()
            case "committed":
                if self._is_ours(message.committed):
                    self._commit = message.committed
                    self._resend_at = now + self.times.resend_after_s
            case "quiesced":
                self.quiesced = True  # a stream has one destination at most
            case other:
                raise TransferError(f"unexpected message {other!r} from prefill")

    async def _on_progress(self, progress: prefill_pb2.Progress, now: float) -> None:
        await self._say(ToPrefill(heartbeat_echo=prefill_pb2.HeartbeatEcho(seq=progress.seq)))
        is_computed = progress.computed_tokens >= self.request.prompt_len
        if is_computed and (self._grown_at is None or progress.bytes_done > self._bytes_done):
            self._grown_at = now
        self._bytes_done = max(self._bytes_done, progress.bytes_done)

    def _on_prefilled(self) -> None:
        """Let the first token out, unless a reservation still has to be waited for."""
        prefilled = self._prefilled
        if prefilled is None or self.committed:
            return
        if self.target is None and not self.hooks.ends_at_once(self.request, prefilled):
            return
        self.committed = True
        self._tail_at = _now()
        self.stopped = self.hooks.first_token(self.request, self.pair, prefilled)

    async def _name_destination(self) -> None:
        self.target = self.hooks.destination(self.request, self.pair)
        await self.hooks.expect(self.target)  # before prefill can know where to write
        self._heard_at = _now()
        await self._say(ToPrefill(destination=self.target.message))
        self._on_prefilled()

    def _is_ours(self, committed: prefill_pb2.Committed) -> bool:
        """Whether a Committed names this attempt's destination; others are stale and dropped."""
        if self.target is None:
            return False
        mine = self.target.message
        return (committed.transfer_id, committed.nonce, committed.generation) == (
            mine.transfer_id,
            mine.nonce,
            mine.generation,
        )

    def _is_complete(self) -> bool:
        return (
            self.target is not None
            and self._commit is not None
            and self.committed
            and len(self._arrived) == len(self.target.senders)
            and not self._waits_for_drafts()
        )

    @property
    def draft_valid(self) -> bool:
        """Whether every rank has all draft rows; otherwise the drafter starts without them."""
        return (
            self.target is not None
            and any(self.target.draft_senders)
            and self._commit is not None
            and self._commit.draft_valid
            and len(self._has_drafts) == len(self.target.senders)
        )

    def _waits_for_drafts(self) -> bool:
        """Draft rows are in place before Committed, only their records may be late: a moment's patience."""
        if self.draft_valid or self._commit is None or not self._commit.draft_valid:
            return False
        if self.target is None or not any(self.target.draft_senders):
            return False
        if self._drafts_until is None:
            self._drafts_until = _now() + DRAFT_PATIENCE_S
        return _now() < self._drafts_until

    # ---------------------------------------------------------------- clocks

    def _next_deadline(self) -> float | None:
        if self.target is None:
            return None  # a lost peer ends the stream by keepalive
        times = self.times
        deadlines = [self._heard_at + times.lease_s]
        if self._commit is None and self._grown_at is not None:
            patience = max(times.progress_timeout_s, times.handle_deadline_s)
            deadlines.append(self._grown_at + patience)
        if self._tail_at is not None:
            deadlines.append(self._tail_at + times.transfer_deadline_s)
        if self._resend_at is not None:
            deadlines.append(self._resend_at)
        if self._drafts_until is not None:
            deadlines.append(self._drafts_until)
        return min(deadlines)

    async def _on_deadline(self) -> None:
        """The earliest deadline has passed: ask for records again, or give up naming the clock."""
        times, now = self.times, _now()
        if self._tail_at is not None and now >= self._tail_at + times.transfer_deadline_s:
            raise TransferError(
                f"the transfer is not complete {times.transfer_deadline_s:g} s after the first token",
                code="transfer_stalled",
            )
        if now >= self._heard_at + times.lease_s:
            raise DeadlineExceeded(
                f"no word from prefill for {times.lease_s:g} s", code="lease_expired"
            )
        if self._resend_at is not None and now >= self._resend_at:
            self._resend_at = now + times.resend_after_s
            resend = prefill_pb2.ResendRecords(missing=self._missing_now())
            await self._say(ToPrefill(resend_records=resend))
            return
        if self._commit is None and self._grown_at is not None:
            patience = max(times.progress_timeout_s, times.handle_deadline_s)
            if now >= self._grown_at + patience:
                raise TransferError(
                    f"{self._bytes_done} bytes in place and none more for {patience:g} s",
                    code="transfer_stalled",
                )

    def _missing_now(self) -> list[prefill_pb2.MissingRecords]:
        """What the ranks report missing; everything of a rank that has not said what it misses."""
        assert self.target is not None
        missing: list[prefill_pb2.MissingRecords] = []
        for rank, senders in enumerate(self.target.senders):
            if rank in self._arrived:
                continue
            known = self._missing.get(rank)
            if known is None:
                known = tuple(prefill_pb2.MissingRecords(sender=s, receiver=rank) for s in senders)
            missing.extend(known)
        return missing

    # ---------------------------------------------------------------- the end

    async def close(self, reason: prefill_pb2.AbortReason | None) -> bool:
        """Finish the stream; True when the destination is proven quiet (or none was named).

        reason: why the attempt is given up, None after `run` returned with everything in place.
        """
        call = self.call
        if self.transfer_id is not None:
            await self.hooks.forget(self.transfer_id)
        if call is None or self.is_over:
            return self._is_quiet()
        try:
            async with asyncio.timeout(self.times.drain_s):
                if reason is not None:
                    abort = prefill_pb2.Abort(generation=self._generation, reason=reason)
                    await self._say(ToPrefill(abort=abort))
                while not self.is_over and not (reason is not None and self.quiesced):
                    match await self.inbox.get():
                        case Heard(message):
                            if message.WhichOneof("message") == "quiesced":
                                self.quiesced = True
                        case Ended():
                            self.is_over = True
                        case _:
                            pass  # arrivals and news of admission no longer matter
        except TimeoutError:
            pass  # not proven on the stream; the caller asks by Quiesce
        finally:
            call.cancel()
        return reason is None or self._is_quiet()

    def refused_by(self, error: K3Error) -> bool:
        """Whether prefill refused the request in its own words before it took it: it has posted nothing."""
        spoken = isinstance(error, REFUSALS) or error.code in ("draining", "starting")
        return spoken and not self.accepted

    def _is_quiet(self) -> bool:
        return self.target is None or self.quiesced

    @property
    def _generation(self) -> int:
        return 0 if self.target is None else self.target.message.generation

    async def _say(self, message: prefill_pb2.PrefillRequest) -> None:
        assert self.call is not None
        await self.call.send(message)


def arrivals(rank: int, status: plan_pb2.TransferStatus) -> tuple[int, Item] | None:
    """(transfer id, item) of a mover's report about an incoming transfer; None for other reports."""
    match status.WhichOneof("status"):
        case "arrived":
            return status.arrived.transfer_id, Arrived(rank, status.arrived.draft_complete)
        case "missing":
            return status.missing.transfer_id, Missing(rank, tuple(status.missing.missing))
        case _:
            return None


def _now() -> float:
    return asyncio.get_running_loop().time()
