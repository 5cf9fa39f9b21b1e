"""A decode instance reduced to what prefill sees of it: a pool, a transfer agent, and one gRPC channel.

Real NIXL, real bytes; nothing is generated. Used to test the prefill service alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field

import grpc.aio
import torch

from k3.cache.layout import CacheLayout, Unit, build_layout, fingerprint
from k3.cache.storage import Storage
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.transfer.agent import Region
from k3.transfer.nixl import NIXL_VERSION, NixlAgent
from k3.transfer.peers import pool_of
from k3.transfer.record import Record, unpack
from k3.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

WAIT_S = 20.0


@dataclass(slots=True)
class Peer:
    """Pools of one rank, filled with NaN, registered with an agent of its own."""

    instance_id: str
    spec: K3Spec
    document: bytes
    storage: Storage
    agent: NixlAgent
    records: list[Record] = field(default_factory=list)

    @classmethod
    def open(
        cls, spec: K3Spec, document: bytes, *, page_tokens: int, dtype: str, n_pages: int
    ) -> Peer:
        layout = build_layout(spec, Mesh(), 0, page_tokens=page_tokens, dtype=dtype)
        storage = Storage(layout, n_pages, 8, torch.device("cpu"), fill_nan=True)
        instance_id = f"decode-{secrets.token_hex(4)}"
        agent = NixlAgent(instance_id)
        agent.register(_regions(layout, storage))
        return cls(instance_id, spec, document, storage, agent)

    def connect_request(self) -> prefill_pb2.ConnectRequest:
        endpoint = prefill_pb2.RankEndpoint(
            rank=0,
            agent_name=self.agent.name,
            agent_metadata=self.agent.metadata(),
            pools=[pool_of(region) for region in self.agent.regions],
        )
        return prefill_pb2.ConnectRequest(
            proto_version=1,
            instance_id=self.instance_id,
            layout=self.document,
            layout_fingerprint=fingerprint(self.document),
            nixl_version=NIXL_VERSION,
            geometry=prefill_pb2.Geometry(
                pp=1,
                tp=1,
                cp=1,
                stage_bounds=[0, self.spec.num_layers],
                n_pages=self.storage.n_pages,
                n_slots=self.storage.n_slots,
                slot_columns=1,
            ),
            ranks=[endpoint],
        )

    def start(self, token_ids: list[int], **fields: object) -> prefill_pb2.Start:
        """A plain greedy request, with `fields` instead of the defaults."""
        values: dict[str, object] = {
            "proto_version": 1,
            "instance_id": self.instance_id,
            "request_id": f"test-{secrets.token_hex(4)}",
            "attempt": 1,
            "token_ids": token_ids,
            "sampling": common_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0),
            "stop": common_pb2.StopParams(max_tokens=8),
            "layout_fingerprint": fingerprint(self.document),
        }
        return prefill_pb2.Start(**{**values, **fields})  # type: ignore[arg-type]

    def destination(
        self, pages: list[int], state_slot: int, lease_s: float = 30.0
    ) -> prefill_pb2.Destination:
        return prefill_pb2.Destination(
            transfer_id=secrets.randbits(64),
            nonce=secrets.randbits(32),
            generation=1,
            pages=pages,
            state_slot=state_slot,
            lease_s=lease_s,
        )

    async def records_of(self, committed: prefill_pb2.Committed) -> list[Record]:
        """Wait until as many records as announced are here."""
        wanted = sum(total.records for total in committed.totals)
        async with asyncio.timeout(WAIT_S):
            while True:
                self.records += [r for note in self.agent.notes() if (r := unpack(note))]
                found = [r for r in self.records if r.transfer_id == committed.transfer_id]
                if len(found) >= wanted:
                    return found
                await asyncio.sleep(0.005)

    def close(self) -> None:
        self.agent.close()


class Call:
    """One `Prefill` stream. A task of its own reads and echoes heartbeats, as decode does: a test may take its time.

    As decode does, it says nothing between its first message and the first answer, and nothing after `Ending`.
    """

    def __init__(self, stub: prefill_pb2_grpc.PrefillServiceStub) -> None:
        self._call = stub.Prefill()
        self._writing = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._n_taken = 0
        self._error: grpc.aio.AioRpcError | None = None
        self.seen: list[prefill_pb2.PrefillResponse] = []
        self.does_echo = self.does_half_close = True
        self._has_begun = False
        self._is_answered = asyncio.Event()
        self._is_ending = False
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._is_answered.set()
                if response.HasField("ending") and self.does_half_close:
                    async with self._writing:
                        self._is_ending = True
                        await self._call.done_writing()
                    continue
                self.seen.append(response)
                self._arrived.set()
                if response.HasField("progress") and self.does_echo:
                    await self._echo(response.progress.seq)
        except grpc.aio.AioRpcError as error:
            self._error = error
        finally:
            self._is_answered.set()
            self._arrived.set()

    async def _echo(self, seq: int) -> None:
        over = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # reading on tells how it ended
        with contextlib.suppress(*over):
            await self.say(heartbeat_echo=prefill_pb2.HeartbeatEcho(seq=seq))

    async def say(self, **message: object) -> None:
        async with self._writing:
            if self._has_begun:
                await self._is_answered.wait()
            self._has_begun = True
            if not self._is_ending:
                await self._call.write(prefill_pb2.PrefillRequest(**message))  # type: ignore[arg-type]

    def has_seen(self, kind: str) -> bool:
        return any(response.HasField(kind) for response in self.seen)

    async def next(self, kind: str) -> prefill_pb2.PrefillResponse:
        """The next message of a kind, passing over others. Raises AioRpcError at an early end."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for response in self.seen[self._n_taken :]:
                    self._n_taken += 1
                    if response.HasField(kind):
                        return response
                if self._reader.done():
                    status = await self._call.code()
                    raise self._error or AssertionError(
                        f"the stream ended with {status} before {kind!r}"
                    )
                self._arrived.clear()
                await self._arrived.wait()

    async def end(self) -> grpc.StatusCode:
        """Status of the call once everything was read."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([self._reader])
            return await self._call.code()

    async def expect(self, status: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        """The call ends with this status; a failing test shows the details of another one."""
        ended = await self.end()
        assert ended is status, f"{ended}: {await self._call.details()}"

    def cancel(self) -> None:
        self._call.cancel()


def _regions(layout: CacheLayout, storage: Storage) -> tuple[Region, ...]:
    regions = []
    for entry in layout.fields:
        pool = storage.pools[entry.name]
        units = storage.n_pages if entry.unit is Unit.PAGE else storage.n_slots
        regions.append(Region(entry.name, pool.data_ptr(), 0, "DRAM", entry.unit_bytes, units))
    return tuple(regions)
