"""The fleet: every instance, followed through its `Watch` stream, and leases on pairs of them.

One task per instance owns its connection: `Describe`, health check, then snapshots. Three missed snapshots, or a
broken stream with a failed `Describe`, mean down; a failed request means suspect and an immediate probe. Listeners are
told of every change that may let a waiting request in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3.errors import NotFound, RequestRejected
from k3.rpc.client import ChannelPool
from k3.rpc.status import from_rpc_error
from k3.v1 import instance_pb2, instance_pb2_grpc
from router.fleet.cache_events import CacheFollower, CacheGap
from router.fleet.instance import Instance, InstanceState, Lease, Role
from router.fleet.pairing import (
    InstanceView,
    Look,
    Need,
    NoPair,
    Pair,
    PairingRules,
    choose,
    same_layout,
)

log = logging.getLogger("k3.router.fleet")
DESCRIBE_TIMEOUT_S = 1.0
SNAPSHOT_TIMEOUT_S = 6.0  # three missed snapshots
BACKOFF_S = (0.1, 2.0)
STARTING_POLL_S = 0.2  # it answers, it only is not ready yet
HEALTHY = health_pb2.HealthCheckResponse.SERVING


class Registry:
    """All instances by address. Start inside a running event loop; `stop` ends every task."""

    def __init__(self, channels: ChannelPool, rules: PairingRules, vocab_size: int) -> None:
        self._channels = channels
        self._rules = rules
        self._vocab_size = vocab_size
        self._instances: dict[str, Instance] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._mismatched: set[tuple[str, str]] = set()
        self._listeners: list[Callable[[], None]] = []

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All, in order of registration."""
        return tuple(self._instances.values())

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change of state or load."""
        self._listeners.append(listener)

    def add(self, role: Role, address: str) -> Instance:
        """Register an address and follow it; idempotent. RequestRejected when it has the other role."""
        known = self._instances.get(address)
        if known is not None:
            if known.role is not role:
                raise RequestRejected(
                    f"{address} is registered as {known.role.value}; remove it first", param="role"
                )
            return known
        instance = Instance(role, address, time.monotonic())
        self._instances[address] = instance
        self._tasks[address] = asyncio.create_task(self._follow(instance), name=f"follow {address}")
        return instance

    async def remove(self, name: str) -> None:
        """Forget an instance, given its id or address. Requests running there go on."""
        instance = self.find(name)
        del self._instances[instance.address]
        task = self._tasks.pop(instance.address)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._changed()

    def find(self, name: str) -> Instance:
        """By id or address. NotFound otherwise."""
        for instance in self._instances.values():
            if name in (instance.address, instance.instance_id):
                return instance
        raise NotFound(f"no instance {name!r}; GET /admin/instances lists them")

    async def stop(self) -> None:
        """End every task."""
        tasks = [*self._tasks.values(), *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def usable(self, role: Role) -> list[Instance]:
        """Instances of a role that may be sent requests now."""
        now = time.monotonic()
        return [
            instance
            for instance in self._instances.values()
            if instance.role is role and instance.is_usable and instance.circuit.allows(now)
        ]

    def choose(self, need: Need, excluded: frozenset[str] = frozenset()) -> Pair | NoPair:
        """A pair for a request, without the excluded decode instances (ids)."""
        decodes = [
            view for view in _views(self.usable(Role.DECODE)) if view.instance_id not in excluded
        ]
        prefills, look = _views(self.usable(Role.PREFILL)), self._cached(need)
        return choose(need, prefills, decodes, self._rules, self._is_compatible, look)

    def lease(self, pair: Pair, need: Need) -> Lease:
        """Count one sample at a pair that was just chosen."""
        decode = self.find(pair.decode.address)
        prefill = self._instances.get(pair.prefills[0].address) if pair.prefills else None
        decode.circuit.sent(time.monotonic())
        return Lease(decode, prefill, need, time.monotonic())

    def _cached(self, need: Need) -> Look:
        """Adds what an instance has of the prompt."""
        pages, now = need.pages, time.monotonic()

        def look(view: InstanceView) -> InstanceView:
            if pages is None:
                return view
            usable = self._instances[view.address].usable_tokens(pages, now)
            return replace(view, usable_tokens=usable)

        return look

    def is_usable(self, pair: Pair) -> bool:
        """Whether the decode instance of a pair chosen earlier is still there, and still the same."""
        decode = self._by_id(pair.decode.instance_id)
        return decode is not None and decode.is_usable

    def live_decode(self) -> InstanceView | None:
        """Some decode instance that a request could be sent to, whatever its length; None when there is none."""
        prefills = _views(self.usable(Role.PREFILL))
        for decode in _views(self.usable(Role.DECODE)):
            if decode.is_alone or any(self._is_compatible(decode, other) for other in prefills):
                return decode
        return None

    def decode_views(self) -> list[InstanceView]:
        """Usable decode instances."""
        return _views(self.usable(Role.DECODE))

    def failed(self, name: str, reason: str) -> None:
        """A request failed at an instance: suspect it, count it, probe it at once."""
        instance = self._by_id(name)
        if instance is None:
            return
        now = time.monotonic()
        instance.circuit.failed(now)
        instance.suspected(reason, now)
        if instance.address not in self._probes:
            probe = asyncio.create_task(self._probe(instance), name=f"probe {instance.address}")
            self._probes[instance.address] = probe
        self._changed()

    def succeeded(self, name: str) -> None:
        """A request ended well at an instance."""
        instance = self._by_id(name)
        if instance is not None:
            instance.circuit.succeeded(time.monotonic())

    def ended(self, name: str) -> None:
        """A request ended without a verdict on the instance."""
        instance = self._by_id(name)
        if instance is not None:
            instance.circuit.ended()
        self._changed()

    def mismatched(self, decode_id: str, prefill_id: str, reason: str) -> None:
        """The two cannot transfer: never pair them again, while both live."""
        pair = (decode_id, prefill_id)
        if pair not in self._mismatched:
            self._mismatched.add(pair)
            log.warning(
                "pair is incompatible",
                extra={"decode": decode_id, "prefill": prefill_id, "reason": reason},
            )

    def incompatible_with(self, instance_id: str) -> list[str]:
        """Instances it is never paired with."""
        pairs = [pair for pair in self._mismatched if instance_id in pair]
        return sorted(other for pair in pairs for other in pair if other != instance_id)

    def _is_compatible(self, decode: InstanceView, prefill: InstanceView) -> bool:
        if (decode.instance_id, prefill.instance_id) in self._mismatched:
            return False
        if not same_layout(decode, prefill):
            self.mismatched(
                decode.instance_id,
                prefill.instance_id,
                f"layouts {decode.layout_fingerprint[:12]} and {prefill.layout_fingerprint[:12]}, "
                f"models {decode.model_digest[:12]} and {prefill.model_digest[:12]}",
            )
            return False
        return True

    def _by_id(self, instance_id: str) -> Instance | None:
        for instance in self._instances.values():
            if instance.instance_id == instance_id:
                return instance
        return None

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    async def _follow(self, instance: Instance) -> None:
        """Own one instance's connection until cancelled."""
        pause_s = BACKOFF_S[0]
        while True:
            try:
                await self._describe(instance)
                pause_s = BACKOFF_S[0]
                await self._watch(instance)
                reason = "the stream of snapshots ended"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if from_rpc_error(error).code == "starting":
                    instance.enter(InstanceState.PROBING, time.monotonic(), str(error.details()))
                    await asyncio.sleep(STARTING_POLL_S)
                    continue
            except CacheGap as gap:  # says nothing against the instance
                instance.cache.lose()
                extra = {"instance_id": instance.instance_id, "reason": str(gap)}
                log.info("cache events are read anew", extra=extra)
                await asyncio.sleep(BACKOFF_S[0])
                continue
            except TimeoutError:
                reason = f"no snapshot for {SNAPSHOT_TIMEOUT_S:.0f} s"
            now = time.monotonic()
            if instance.is_usable and instance.state is not InstanceState.DOWN:
                # Not down yet: the stream may have been cut for another reason. Describe decides.
                instance.suspected(reason, now)
                self._changed()
                if await self._answers(instance):
                    continue
            instance.enter(InstanceState.DOWN, time.monotonic(), reason)
            self._changed()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_S[1])

    async def _answers(self, instance: Instance) -> bool:
        try:
            await self._describe(instance)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def _describe(self, instance: Instance) -> None:
        """One probe: identity and liveness. Raises AioRpcError."""
        channel = self._channels.channel(instance.address)
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        identity = await stub.Describe(instance_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)
        health_stub: Any = health_pb2_grpc.HealthStub(channel)  # the package has no type stubs
        health = await health_stub.Check(
            health_pb2.HealthCheckRequest(), timeout=DESCRIBE_TIMEOUT_S
        )
        if identity.instance_id != instance.instance_id:
            gone = instance.instance_id
            self._mismatched = {pair for pair in self._mismatched if gone not in pair}
        instance.described(identity, self._vocab_size, time.monotonic())
        if health.status != HEALTHY:
            instance.suspected("health check says not serving", time.monotonic())
        self._changed()

    async def _watch(self, instance: Instance) -> None:
        """Read snapshots until the stream ends, breaks or falls silent, or another instance answers."""
        stub = instance_pb2_grpc.InstanceServiceStub(self._channels.channel(instance.address))
        call, follower = stub.Watch(instance_pb2.WatchRequest()), CacheFollower()
        try:
            while True:
                # Not wait_for: until Python 3.12 it swallows a cancellation that meets the end of the stream.
                async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                    message = await call.read()
                if not isinstance(message, instance_pb2.WatchResponse):
                    return
                if message.instance_id != instance.instance_id:
                    await self._describe(instance)
                follower.apply(message, instance.cache)
                instance.loaded(message.load, time.monotonic())
                self._changed()
        finally:
            call.cancel()

    async def _probe(self, instance: Instance) -> None:
        """One extra probe; at most one per instance runs."""
        try:
            await self._describe(instance)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            instance.enter(InstanceState.DOWN, time.monotonic(), reason)
            self._changed()
        finally:
            del self._probes[instance.address]


def _views(instances: Iterable[Instance]) -> list[InstanceView]:
    return [instance.view() for instance in instances]
