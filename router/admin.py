"""The admin port: instances, open requests, draining, configuration, log level.

Mutations answer 202 with the new state and are idempotent. Bound to loopback unless configured otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import grpc
import grpc.aio
import orjson
from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from k3.errors import RequestRejected
from k3.ports import is_address
from k3.rpc.client import ChannelPool
from k3.rpc.status import from_rpc_error
from k3.v1 import instance_pb2, instance_pb2_grpc
from router.fleet.instance import Instance, Role
from router.fleet.registry import Registry
from router.lifecycle import Phase
from router.openai.models import json_response
from router.openai.schemas import Body
from router.openai.serving import Serving

CALL_TIMEOUT_S = 5.0


class RegisterBody(Body):
    """POST /admin/instances."""

    role: Literal["prefill", "decode"]
    address: str


class DrainBody(Body):
    """POST /admin/instances/{id}/drain."""

    timeout_s: float | None = Field(default=None, ge=0)


class LogLevelBody(Body):
    """PUT /admin/log_level."""

    level: Literal["debug", "info", "warning", "error"]


class Admin:
    """Handlers of the admin port. drain() starts the router's own drain; config_json is masked already."""

    def __init__(
        self,
        serving: Serving,
        channels: ChannelPool,
        config_json: str,
        drain: Callable[[], None],
    ) -> None:
        self._serving = serving
        self._channels = channels
        self._config_json = config_json
        self._drain = drain

    @property
    def _registry(self) -> Registry:
        return self._serving.registry

    def add_routes(self, app: FastAPI) -> None:
        """Put every handler on `app`."""
        for method, path, handler in (
            ("GET", "/admin/instances", self.instances),
            ("POST", "/admin/instances", self.register),
            ("DELETE", "/admin/instances/{name}", self.remove),
            ("POST", "/admin/instances/{name}/drain", self.drain_instance),
            ("POST", "/admin/instances/{name}/undrain", self.undrain_instance),
            ("POST", "/admin/drain", self.drain_self),
            ("GET", "/admin/requests", self.requests),
            ("DELETE", "/admin/requests/{request_id}", self.abort),
            ("POST", "/admin/cache/flush", self.flush_caches),
            ("GET", "/admin/config", self.config),
            ("PUT", "/admin/log_level", self.log_level),
        ):
            app.add_route(path, handler, methods=[method])

    async def instances(self, request: Request) -> Response:
        """All instances with state and load."""
        return json_response([self._entry(instance) for instance in self._registry.instances])

    async def register(self, request: Request) -> Response:
        """Follow a new address."""
        body = await self._serving.reader.read(request, RegisterBody, always=True)
        if not is_address(body.address):
            text = f"address: {body.address[:80]!r}: expected host:port with a port from 1 to 65535"
            raise RequestRejected(text, param="address")
        instance = self._registry.add(Role(body.role), body.address)
        return json_response(self._entry(instance), 202)

    def _entry(self, instance: Instance) -> dict[str, Any]:
        unfit = self._registry.incompatible_with(instance.instance_id)
        return {**describe(instance), "incompatible_with": unfit}

    async def remove(self, request: Request) -> Response:
        """Forget an instance; what runs there goes on."""
        await self._registry.remove(request.path_params["name"])
        return json_response({"removed": request.path_params["name"]}, 202)

    async def drain_instance(self, request: Request) -> Response:
        """Ask an instance to take nothing new."""
        length = request.headers.get("content-length", "0")
        has_body = length != "0" or "transfer-encoding" in request.headers
        body = (
            await self._serving.reader.read(request, DrainBody, always=True)
            if has_body
            else DrainBody()
        )
        return await self._set_drain(request, True, body.timeout_s or 0.0)

    async def undrain_instance(self, request: Request) -> Response:
        """Ask an instance to take requests again."""
        return await self._set_drain(request, False, 0.0)

    async def _set_drain(self, request: Request, drain: bool, timeout_s: float) -> Response:
        instance = self._registry.find(request.path_params["name"])
        stub = instance_pb2_grpc.InstanceServiceStub(self._channels.channel(instance.address))
        message = instance_pb2.DrainRequest(drain=drain, timeout_s=timeout_s)
        try:
            answer = await stub.Drain(message, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        state = {"id": instance.instance_id, "draining": answer.draining, "running": answer.running}
        return json_response(state, 202)

    async def drain_self(self, request: Request) -> Response:
        """Start the router's own drain, as a first SIGTERM does."""
        self._drain()
        now = self._serving.lifecycle.phase
        entered = Phase.DRAINING if now is Phase.RUNNING else now  # at the loop's next turn
        return json_response({"phase": entered.value}, 202)

    async def requests(self, request: Request) -> Response:
        """Open generations."""
        return json_response(self._serving.requests.list())

    async def abort(self, request: Request) -> Response:
        """End a generation."""
        n = self._serving.requests.abort(request.path_params["request_id"])
        return json_response({"aborted": n}, 202)

    async def flush_caches(self, request: Request) -> Response:
        """Drop unpinned pages of the prefix cache of every usable instance that computes prompts."""
        alone = [i for i in self._registry.usable(Role.DECODE) if i.view().is_alone]
        instances = [*self._registry.usable(Role.PREFILL), *alone]
        answers = await asyncio.gather(*(self._flush(instance) for instance in instances))
        return json_response(answers, 202)

    async def _flush(self, instance: Instance) -> dict[str, Any]:
        stub = instance_pb2_grpc.InstanceServiceStub(self._channels.channel(instance.address))
        try:
            answer = await stub.FlushCache(instance_pb2.FlushCacheRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return {"id": instance.instance_id, "error": error.code().name}
        return {
            "id": instance.instance_id,
            "pages": answer.pages,
            "checkpoints": answer.checkpoints,
        }

    async def config(self, request: Request) -> Response:
        """The resolved configuration."""
        return json_response(orjson.loads(self._config_json))

    async def log_level(self, request: Request) -> Response:
        """Change the least severe level written."""
        body = await self._serving.reader.read(request, LogLevelBody, always=True)
        logging.getLogger().setLevel(body.level.upper())
        return json_response({"level": body.level}, 202)


def describe(instance: Instance) -> dict[str, Any]:
    """An instance as operators see it."""
    now = time.monotonic()
    identity, snapshot = instance.identity, instance.snapshot
    entry: dict[str, Any] = {
        "id": instance.instance_id,
        "role": instance.role.value,
        "address": instance.address,
        "state": instance.state.value,
        "reason": instance.reason,
        "ready": instance.is_usable,
        "circuit": instance.circuit.state(now).value,
        "in_flight": instance.in_flight,
        "since_s": round(now - instance.since, 3),
        "last_seen_ms": round(1000 * (now - snapshot.at)) if snapshot else None,
    }
    if identity is not None:
        geometry = identity.geometry
        entry |= {
            "version": identity.version,
            "config_hash": identity.config_hash,
            "layout_fingerprint": identity.layout_fingerprint,
            "draft_fingerprint": identity.draft_fingerprint,
            "model": identity.model,
            "model_digest": identity.model_digest,
            "parallel": {"tp": geometry.tp, "pp": geometry.pp, "cp": geometry.cp},
        }
    if identity is not None and snapshot is not None:
        load = snapshot.load
        tokens = identity.page_tokens * max(identity.geometry.cp, 1)
        entry["load"] = {
            "running": load.running,
            "waiting": load.waiting,
            "kv_used_tokens": load.pages_used * tokens,
            "kv_total_tokens": load.pages_total * tokens,
            "state_slots_used": load.state_slots_used,
            "state_slots_total": load.state_slots_total,
            "draft_slots_used": load.draft_slots_used,
        }
    return entry
