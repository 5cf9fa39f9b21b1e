"""One sample of one request: call decode, tell failures apart, try once more elsewhere while nothing has been sent.

At most two `Generate` calls. The first token is the commit: after it a failure ends the request. Decode walks the
prefill candidates itself and reports the failed ones here; a decode that is full sends us to another; a request on
whose board two instances died is poison.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import grpc.aio

from k3.errors import (
    DeadlineExceeded,
    GroupFailed,
    K3Error,
    QueueFull,
    RequestAborted,
    RequestRejected,
    Unavailable,
)
from k3.rpc.client import ChannelPool, call_metadata
from k3.rpc.convert import (
    finish_from_proto,
    logprobs_to_proto,
    sampling_to_proto,
    speculation_from_proto,
    stop_to_proto,
    times_from_proto,
    token_from_proto,
    usage_from_proto,
)
from k3.rpc.status import ERROR_CODE, from_rpc_error
from k3.telemetry.metrics import RouterMetrics
from k3.types import (
    FinishReason,
    LogprobParams,
    SamplingParams,
    Speculation,
    StageTimes,
    StopParams,
    TokenEvent,
    Usage,
)
from k3.v1 import decode_pb2, decode_pb2_grpc
from router.admission import Admission, Placement
from router.fleet.pairing import Need, Pair
from router.fleet.prefix import PromptPages
from router.fleet.registry import Registry

log = logging.getLogger("k3.router.attempt")
MAX_CALLS = 2
POISON = "poison_request"
# Reasons of a failed candidate that speak against the instance, and those that speak against the pair.
INSTANCE_FAULTS = frozenset(
    {"unavailable", "instance_failed", "transfer_stalled", "transfer_failed", "deadline"}
)
PAIR_FAULTS = frozenset({"layout_mismatch", "not_allowed"})


@dataclass(slots=True)
class Trace:
    """What happened to a sample, for logs, headers and operators."""

    pair: Pair | None = None
    decode_id: str = ""
    prefill_id: str = ""
    queue_s: float = 0.0  # in the router's queue
    pair_s: float = 0.0  # choosing
    n_calls: int = 0
    n_deaths: int = 0  # decode instances lost, process or ranks, after they took it on board
    failed_candidates: list[str] = field(default_factory=list[str])
    failed_reasons: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Sample:
    """What one `Generate` call carries. deadline: monotonic seconds."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    logprobs: LogprobParams
    salt: bytes
    deadline: float
    n_samples: int = 1  # of the whole request, for the choice of a pair
    pages: PromptPages | None = None
    session: str = ""
    draft_tokens: int | None = None  # a step checks at most; None: as many as the instance proposes
    on_dispatch: Callable[[Trace], None] = lambda trace: None

    @property
    def need(self) -> Need:
        """What it asks of an instance."""
        return Need(
            len(self.token_ids), self.stop.max_tokens, self.n_samples, self.pages, self.session
        )


class Tokens(NamedTuple):
    """Tokens of one step. cached_tokens: of the prompt, as in the usage at the end. speculation: so far."""

    tokens: tuple[TokenEvent, ...]
    cached_tokens: int = 0
    speculation: Speculation | None = None


class Finished(NamedTuple):
    """The end of a sample."""

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage
    times: StageTimes
    prefill_id: str
    speculation: Speculation | None


Event = Tokens | Finished


class Dispatcher:
    """Runs samples against the fleet."""

    def __init__(
        self,
        registry: Registry,
        admission: Admission,
        channels: ChannelPool,
        metrics: RouterMetrics,
        policy: str,
    ) -> None:
        self._registry = registry
        self._admission = admission
        self._channels = channels
        self._metrics = metrics
        self._policy = policy

    async def run(
        self, sample: Sample, trace: Trace, *, at: Pair | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events of a sample, `Finished` last. `at`: the pair an earlier sample of the request was given.

        Raises K3Error. Close the iterator to cancel the call.
        """
        failure: K3Error | None = None
        while True:
            started = time.monotonic()
            placement = await self._place(sample, trace, at, failure)
            trace.queue_s += placement.queue_s
            trace.pair_s += max(time.monotonic() - started - placement.queue_s, 0.0)
            trace.n_calls += 1
            trace.pair = placement.pair
            trace.decode_id = placement.pair.decode.instance_id
            first = (*placement.pair.prefills, placement.pair.decode)[
                0
            ]  # decode where it needs none
            trace.prefill_id = first.instance_id
            sample.on_dispatch(trace)
            call = _Call(self._registry, self._channels, sample, placement, trace)
            try:
                async with aclosing(call.events()) as events:
                    async for event in events:
                        yield event
                return
            except K3Error as error:
                if call.is_committed or not may_retry(error, trace):
                    raise final(error, trace) from error
                failure = error
                self._metrics.retries.labels("decode", error.code).inc()
            finally:
                self._admission.release(placement)

    async def _place(
        self, sample: Sample, trace: Trace, at: Pair | None, failure: K3Error | None
    ) -> Placement:
        """A pair: the given one, then another than the failed one; after a full queue the same one again."""
        if at is not None and failure is None and self._registry.is_usable(at):
            return self._admission.join(at, sample.need)
        excluded = frozenset({trace.decode_id}) if failure else frozenset[str]()
        try:
            placement = await self._admission.place(sample.need, excluded)
        except Unavailable as error:
            if failure is None:
                raise
            if not isinstance(failure, QueueFull):
                raise final(failure, trace) from error
            placement = await self._admission.place(sample.need)
        self._metrics.queue_s.observe(placement.queue_s)
        self._metrics.pair_selections.labels(self._policy).inc()
        return placement


class _Call:
    """One `Generate` call."""

    def __init__(
        self,
        registry: Registry,
        channels: ChannelPool,
        sample: Sample,
        placement: Placement,
        trace: Trace,
    ) -> None:
        self._registry = registry
        self._channels = channels
        self._sample = sample
        self._placement = placement
        self._decode = placement.pair.decode
        self._trace = trace
        self._is_admitted = False
        self._has_verdict = False
        self.is_committed = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """Events until `Finished`. Raises K3Error; cancels the call when closed."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.channel(self._decode.address))
        call = stub.Generate(
            _request(self._sample, self._placement.pair, self._trace.n_calls),
            timeout=max(self._sample.deadline - time.monotonic(), 0.001),
            metadata=call_metadata(),
        )
        try:
            async for message in call:
                event = self._event(message)
                if event is None:
                    continue
                yield event
                if isinstance(event, Finished):
                    self._verdict(self._registry.succeeded)
                    return
            self._verdict(lambda name: self._registry.failed(name, "no finish"))
            raise GroupFailed(
                f"decode {self._decode.instance_id} ended the stream without a finish"
            )
        except grpc.aio.AioRpcError as error:
            raise self._judge(error) from error
        finally:
            call.cancel()
            self._verdict(self._registry.ended)

    def _event(self, message: decode_pb2.GenerateResponse) -> Event | None:
        match message.WhichOneof("event"):
            case "admitted":
                self._is_admitted = True
                self._placement.lease.admitted()
            case "candidate_failed":
                self._candidate_failed(message.candidate_failed)
            case "tokens":
                self.is_committed = self._is_admitted = True
                self._placement.lease.admitted()
                self._placement.lease.prefilled()
                said = message.tokens
                tokens = tuple(token_from_proto(token) for token in said.tokens)
                return Tokens(tokens, said.cached_tokens, speculation_from_proto(said))
            case "finished":
                return self._finished(message.finished)
            case _:
                pass  # an event of a newer version: nothing we would know to do with it
        return None

    def _finished(self, message: decode_pb2.Finished) -> Finished:
        self._trace.prefill_id = message.prefill_instance_id or self._trace.prefill_id
        try:
            reason = finish_from_proto(message.reason)
        except RequestRejected as error:  # not the client's fault
            raise GroupFailed(f"decode {self._decode.instance_id}: {error}") from error
        return Finished(
            reason,
            message.stop_token_id if message.HasField("stop_token_id") else None,
            usage_from_proto(message.usage),
            times_from_proto(message.times),
            self._trace.prefill_id,
            speculation_from_proto(message),
        )

    def _candidate_failed(self, failed: decode_pb2.CandidateFailed) -> None:
        self._trace.failed_candidates.append(failed.instance_id)
        self._trace.failed_reasons.append(failed.reason)
        log.warning(
            "prefill candidate failed",
            extra={
                "request_id": self._sample.request_id,
                "instance_id": failed.instance_id,
                "reason": failed.reason,
                "detail": failed.message,
            },
        )
        if failed.reason in PAIR_FAULTS:
            self._registry.mismatched(self._decode.instance_id, failed.instance_id, failed.message)
        elif failed.reason in INSTANCE_FAULTS:
            self._registry.failed(failed.instance_id, failed.reason)

    def _judge(self, rpc_error: grpc.aio.AioRpcError) -> K3Error:
        """What a failed call means, and what it says about the instance."""
        error = from_rpc_error(rpc_error)
        names = {str(name) for name, _ in rpc_error.trailing_metadata() or ()}
        is_transport = ERROR_CODE not in names
        if isinstance(error, Unavailable | RequestAborted) and is_transport:
            # Nobody at decode said so: the connection or the process is gone.
            log.warning(
                "decode instance lost with a request on board",
                extra={
                    "request_id": self._sample.request_id,
                    "instance_id": self._decode.instance_id,
                    "detail": str(error),
                },
            )
            error = GroupFailed(f"decode instance {self._decode.instance_id} was lost")
        is_lost = isinstance(error, GroupFailed) and error.code != POISON
        self._trace.n_deaths += is_lost and self._is_admitted
        if is_lost or (is_transport and not isinstance(error, DeadlineExceeded)):
            self._verdict(lambda name: self._registry.failed(name, error.code))
        return error

    def _verdict(self, tell: Callable[[str], None]) -> None:
        if not self._has_verdict:
            self._has_verdict = True
            tell(self._decode.instance_id)


def may_retry(error: K3Error, trace: Trace) -> bool:
    """Whether another pair may be tried for a request that has not answered yet."""
    if trace.n_calls >= MAX_CALLS or trace.n_deaths >= MAX_CALLS or error.code == POISON:
        return False
    return error.retryable and not _is_exhausted(error, trace)


def final(error: K3Error, trace: Trace) -> K3Error:
    """The error a caller sees when there is no further try."""
    if trace.n_deaths >= MAX_CALLS:
        return GroupFailed(
            f"{trace.n_deaths} instances died while serving this request; it is not tried again",
            code=POISON,
        )
    if isinstance(error, QueueFull):
        return QueueFull(str(error), code="capacity_exceeded", retry_after_s=error.retry_after_s)
    if _is_exhausted(error, trace):
        reasons = ", ".join(trace.failed_reasons)
        is_transfer = trace.failed_reasons[-1].startswith("transfer")
        return GroupFailed(
            f"every prefill candidate failed ({reasons})",
            code="transfer_failed" if is_transfer else "instance_failed",
        )
    return error


def _is_exhausted(error: K3Error, trace: Trace) -> bool:
    """Whether decode ran out of prefill candidates: not decode's fault, and no other decode has better ones."""
    is_own_failure = isinstance(error, GroupFailed | QueueFull)
    return isinstance(error, Unavailable) and not is_own_failure and bool(trace.failed_reasons)


def _request(sample: Sample, pair: Pair, n_call: int) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        request_id=sample.request_id,
        attempt=n_call,
        token_ids=sample.token_ids,
        sampling=sampling_to_proto(sample.sampling),
        stop=stop_to_proto(sample.stop),
        logprobs=logprobs_to_proto(sample.logprobs),
        salt=sample.salt,
        draft_tokens=sample.draft_tokens,
        candidates=[
            decode_pb2.PrefillCandidate(instance_id=view.instance_id, address=view.address)
            for view in pair.prefills
        ],
    )
