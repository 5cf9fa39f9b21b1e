"""DecodeService over gRPC: takes requests off the wire, hands them to the engine, streams what it says.

The router is the client. A call that is cancelled, or whose deadline passes, aborts its request. Health, reflection
and InstanceService are the process frame's (`k3/rpc/engine.py`).
"""

from __future__ import annotations

from typing import Any, cast

import grpc.aio

from decode_svc import wire
from decode_svc.driver import DecodeEngine
from k3.errors import K3Error
from k3.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2

SERVICE_NAME = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """One per process; all state is the engine's."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Context) -> None:
        """One request, from admission to its end."""
        life, caller = self._engine.open(request)
        try:
            while not (caller.is_over and caller.is_told):
                answer = wire.response(await caller.next())
                if isinstance(answer, K3Error):
                    raise answer
                await context.write(answer)
        finally:
            remaining_s = cast("float | None", context.time_remaining())  # None: no deadline
            is_late = remaining_s is not None and remaining_s <= 0.0
            reason = (
                prefill_pb2.ABORT_REASON_DEADLINE if is_late else prefill_pb2.ABORT_REASON_CLIENT
            )
            life.close(caller, reason)
