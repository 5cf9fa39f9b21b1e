"""grpc.health.v1 of an engine. A watcher that does not read holds up nobody: no lock is held while one is told.

(The servicer of `grpc_health` sends under the lock that `set` takes, which is how the load board would wait for it.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3.errors import NotFound

Status = health_pb2.HealthCheckResponse.ServingStatus


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The status of each service; "" is the process."""

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()  # replaced when it is set

    def set(self, service: str, status: Status) -> None:
        """Say it from now on, and tell who watches."""
        if self._statuses.get(service) != status:
            self._statuses[service] = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """The status now. Raises NotFound for a service nobody spoke of."""
        status = self._statuses.get(request.service)
        if status is None:
            known = ", ".join(repr(name) for name in self._statuses)
            raise NotFound(f"service={request.service!r}: expected one of {known}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status at once and whenever it differs; a slow reader skips to the newest. Ends with the server."""
        unknown, told = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN, None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, unknown)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()
