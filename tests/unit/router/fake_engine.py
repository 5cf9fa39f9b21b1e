"""Engines at the protocol: real gRPC servers that speak DecodeService and InstanceService and emit scripted tokens.

A script is chosen per request or is the same for all; it is a list of steps: token ids or a message of them to send, a
float to wait, an exception to fail with, `HOLD` to wait until the call is cancelled, or `CUT` to end it as a lost
connection does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3.errors import K3Error
from k3.rpc import convert
from k3.rpc.cache_feed import CacheFeed, CacheTail
from k3.rpc.status import to_grpc, trailing_metadata
from k3.types import Speculation
from k3.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    prefill_pb2,
)

HOLD = "hold"
CUT = "cut"
Step = (
    Sequence[int]
    | Sequence[common_pb2.Token]
    | decode_pb2.Tokens
    | float
    | str
    | K3Error
    | decode_pb2.CandidateFailed
)


@dataclass
class FakeEngine:
    """One instance. Mutable: tests change `load`, `script`, `instance_id` as they go."""

    role: str = "decode"
    instance_id: str = "decode-a"
    layout_fingerprint: str = "layout"
    model_digest: str = "digest"
    vocab_size: int = 4096
    max_model_len: int = 512
    pages_total: int = 64
    max_rows: int = 8
    local_prefill_max: int = 0
    finish: int = common_pb2.FINISH_REASON_STOP
    stop_token_id: int | None = None
    cached_tokens: int = 0
    speculation: Speculation | None = None
    script: Callable[[decode_pb2.GenerateRequest], Sequence[Step]] | Sequence[Step] = ()
    load: instance_pb2.Load = field(default_factory=instance_pb2.Load)
    cache: CacheFeed | None = None
    address: str = ""
    requests: list[decode_pb2.GenerateRequest] = field(default_factory=list)
    n_running: int = 0
    n_cancelled: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    server: Any = None

    async def start(self, address: str = "127.0.0.1:0") -> FakeEngine:
        self.load = instance_pb2.Load(
            ready=True,
            pages_free=self.pages_total,
            pages_total=self.pages_total,
            state_slots_total=self.max_rows + 1,
        )
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        if self.role == "decode":
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(_Decode(self), self.server)
        instance_pb2_grpc.add_InstanceServiceServicer_to_server(_Instance(self), self.server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(), self.server)
        port = self.server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self.server.start()
        return self

    def reset(self) -> None:
        """Forget what tests set and what was asked."""
        self.script, self.finish, self.stop_token_id = (), common_pb2.FINISH_REASON_STOP, None
        self.cached_tokens = self.n_cancelled = 0
        self.requests.clear()
        self.cancelled.clear()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    def change(self, **fields: Any) -> None:
        """Publish another load."""
        for name, value in fields.items():
            setattr(self.load, name, value)
        self.changed.set()

    def steps(self, request: decode_pb2.GenerateRequest) -> Sequence[Step]:
        return self.script(request) if callable(self.script) else self.script


class _Health(health_pb2_grpc.HealthServicer):
    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class _Instance(instance_pb2_grpc.InstanceServiceServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Describe(self, request: Any, context: Any) -> instance_pb2.DescribeResponse:
        e = self._engine
        is_decode = e.role == "decode"
        return instance_pb2.DescribeResponse(
            instance_id=e.instance_id,
            role=instance_pb2.ROLE_DECODE if is_decode else instance_pb2.ROLE_PREFILL,
            version="0",
            model="tiny",
            model_digest=e.model_digest,
            config_hash="c",
            layout_fingerprint=e.layout_fingerprint,
            geometry=prefill_pb2.Geometry(pp=1, tp=1, cp=1, n_pages=e.pages_total),
            max_model_len=e.max_model_len,
            vocab_size=e.vocab_size,
            page_tokens=16,
            max_rows=e.max_rows if is_decode else 0,
            max_queue=8,
            depth=1,
            local_prefill_max=e.local_prefill_max,
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[instance_pb2.WatchResponse]:
        e = self._engine
        tail = CacheTail(lambda: e.cache)
        while True:
            load = instance_pb2.WatchResponse(instance_id=e.instance_id, load=e.load)
            for message in tail.messages(load):
                yield message
            e.changed.clear()
            try:
                async with asyncio.timeout(1.0):
                    await e.changed.wait()
            except TimeoutError:
                pass

    async def Drain(self, request: Any, context: Any) -> instance_pb2.DrainResponse:
        self._engine.change(draining=request.drain)
        return instance_pb2.DrainResponse(draining=request.drain, running=self._engine.n_running)

    async def FlushCache(self, request: Any, context: Any) -> instance_pb2.FlushCacheResponse:
        return instance_pb2.FlushCacheResponse(pages=3)


class _Decode(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        e = self._engine
        e.requests.append(request)
        e.n_running += 1
        n_tokens = 0
        try:
            is_admitted = False
            for step in e.steps(request):
                if not is_admitted and not isinstance(step, K3Error):
                    is_admitted = True
                    yield decode_pb2.GenerateResponse(admitted=decode_pb2.Admitted(queue_s=0.001))
                if isinstance(step, decode_pb2.CandidateFailed):
                    yield decode_pb2.GenerateResponse(candidate_failed=step)
                elif isinstance(step, decode_pb2.Tokens):
                    n_tokens += len(step.tokens)
                    yield decode_pb2.GenerateResponse(tokens=step)
                elif isinstance(step, K3Error):
                    context.set_trailing_metadata(trailing_metadata(step))
                    await context.abort(*to_grpc(step))
                elif step == CUT:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                elif step == HOLD:
                    await asyncio.Event().wait()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    tokens = [
                        t if isinstance(t, common_pb2.Token) else common_pb2.Token(id=t)
                        for t in step
                    ]
                    n_tokens += len(tokens)
                    message = decode_pb2.Tokens(
                        tokens=tokens,
                        cached_tokens=e.cached_tokens,
                        speculation=convert.speculation_to_proto(e.speculation),
                    )
                    yield decode_pb2.GenerateResponse(tokens=message)
            yield decode_pb2.GenerateResponse(
                finished=decode_pb2.Finished(
                    reason=e.finish,  # type: ignore[arg-type]
                    stop_token_id=e.stop_token_id,
                    usage=common_pb2.Usage(
                        prompt_tokens=len(request.token_ids),
                        completion_tokens=n_tokens,
                        cached_tokens=e.cached_tokens,
                    ),
                    times=decode_pb2.StageTimes(prefill_s=0.01, transfer_s=0.002, decode_s=0.1),
                    prefill_instance_id="prefill-a",
                    speculation=convert.speculation_to_proto(e.speculation),
                )
            )
        except (asyncio.CancelledError, GeneratorExit):  # the latter while an event is being sent
            e.n_cancelled += 1
            e.cancelled.set()
            raise
        finally:
            e.n_running -= 1
