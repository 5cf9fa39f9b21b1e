"""A decode service without processes: a real `Incarnation` over scripted ranks and scripted prefill instances.

A script is a coroutine that plays one `Prefill` stream from prefill's side. Ranks answer each plan after `STEP_S`,
emitting the token 100 + number of the row's step, and `FIRST` for a prompt they computed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode_svc.caller import Caller, Event, Failed, Finished
from decode_svc.deployment import Deployment
from decode_svc.incarnation import Incarnation
from decode_svc.intake.source import Deliver, Ended, Heard, Pair, PrefillLost, Proof
from decode_svc.request import Candidate, RequestSpec
from k3.config.tree import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpecConfig,
)
from k3.errors import GroupFailed, K3Error
from k3.telemetry.metrics import DecodeMetrics
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent
from k3.v1 import common_pb2, plan_pb2, prefill_pb2

NANO = Path(__file__).parents[1] / "golden" / "k3"
PAGE_TOKENS = 4
STEP_S = 0.01
FIRST = 11

Script = Callable[["Call"], Coroutine[Any, Any, None]]


class Ranks:
    """One scripted rank. `commands` in the order they were given."""

    def __init__(self) -> None:
        self.commands: list[plan_pb2.TransferCommand] = []
        self.plans: list[plan_pb2.StepPlan] = []
        self.rebuild_s = 0.0  # how long a new transfer agent takes
        self.arrives = True  # whether expected transfers arrive when prefill says committed
        self.n_answered = 0  # plans whose answer was read
        self._results: asyncio.Queue[plan_pb2.StepResult] = asyncio.Queue()
        self._statuses: asyncio.Queue[tuple[int, plan_pb2.TransferStatus]] = asyncio.Queue()
        self._steps: dict[tuple[int, int], int] = defaultdict(int)
        self._busy_until = 0.0
        self.failure: GroupFailed | None = None

    async def send_plan(self, plan: plan_pb2.StepPlan) -> None:
        self.plans.append(plan)
        result = plan_pb2.StepResult(step_id=plan.step_id, step_s=STEP_S, forward_s=STEP_S)
        for row in plan.verify_rows:
            self._steps[row.row, row.epoch] += 1
            entry = result.rows.add(row=row.row, epoch=row.epoch, n_drafts=row.draft_len)
            entry.tokens.add(id=100 + self._steps[row.row, row.epoch])
        for chunk in plan.chunks:
            if chunk.is_final:
                result.rows.add(request=chunk.request, epoch=chunk.epoch).tokens.add(id=FIRST)
        loop = asyncio.get_running_loop()
        self._busy_until = max(self._busy_until, loop.time()) + STEP_S
        loop.call_at(self._busy_until, self._results.put_nowait, result)

    async def next_result(self) -> plan_pb2.StepResult:
        result = await self._results.get()
        self.n_answered += 1
        return result

    async def command(self, rank: int, command: plan_pb2.TransferCommand) -> None:
        copy = plan_pb2.TransferCommand()
        copy.CopyFrom(command)
        self.commands.append(copy)
        if command.HasField("rebuild"):
            ready = plan_pb2.TransferStatus(ready=mover("rebuilt"))
            asyncio.get_running_loop().call_later(self.rebuild_s, self.tell, ready)

    async def next_status(self) -> tuple[int, plan_pb2.TransferStatus]:
        rank, status = await self._statuses.get()
        if self.failure is not None:
            raise self.failure
        return rank, status

    def tell(self, status: plan_pb2.TransferStatus) -> None:
        self._statuses.put_nowait((0, status))

    def arrive(self, transfer_id: int, *, draft_complete: bool = False) -> None:
        arrived = plan_pb2.TransferArrived(transfer_id=transfer_id, draft_complete=draft_complete)
        self.tell(plan_pb2.TransferStatus(arrived=arrived))

    def lose(self) -> None:
        self.failure = GroupFailed("rank 0 is lost")
        self.tell(plan_pb2.TransferStatus())

    def kinds(self) -> list[str | None]:
        return [command.WhichOneof("command") for command in self.commands]


class Call:
    """Prefill's end of one stream."""

    def __init__(self, world: World, address: str, deliver: Deliver) -> None:
        self.world = world
        self.address = address
        self.heard: list[prefill_pb2.PrefillRequest] = []
        self.is_cancelled = False
        self._deliver = deliver
        self._incoming: asyncio.Queue[prefill_pb2.PrefillRequest] = asyncio.Queue()
        self._ended = False

    # decode's side

    async def send(self, message: prefill_pb2.PrefillRequest) -> None:
        copy = prefill_pb2.PrefillRequest()
        copy.CopyFrom(message)
        self.heard.append(copy)
        self._incoming.put_nowait(copy)
        self.world.log.append((self.address, copy.WhichOneof("message") or ""))

    def cancel(self) -> None:
        self.is_cancelled = True

    # prefill's side

    async def wait_for(self, kind: str) -> Any:
        """The next message of a kind; others before it are only kept in `heard`."""
        while True:
            message = await self._incoming.get()
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)

    def say(self, **fields: Any) -> None:
        self._deliver(Heard(prefill_pb2.PrefillResponse(**fields)))

    def end(self, error: K3Error | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._deliver(Ended(error))

    def die(self) -> None:
        """The process is gone without a word."""
        self.end(PrefillLost(f"{self.address} is lost"))

    async def accept(self) -> prefill_pb2.Destination:
        """Start and Destination taken, Accepted said."""
        await self.wait_for("start")
        self.say(accepted=prefill_pb2.Accepted())
        return await self.wait_for("destination")

    def prefilled(self, token: int = FIRST) -> None:
        self.say(prefilled=prefill_pb2.Prefilled(token=common_pb2.Token(id=token), cached_tokens=3))

    def committed(self, destination: prefill_pb2.Destination, **changes: Any) -> None:
        fields = {
            "transfer_id": destination.transfer_id,
            "nonce": destination.nonce,
            "generation": destination.generation,
            **changes,
        }
        self.say(committed=prefill_pb2.Committed(**fields))

    async def finish(self, destination: prefill_pb2.Destination) -> None:
        """Everything well from the first token on."""
        self.prefilled()
        self.committed(destination)
        self.world.ranks.arrive(destination.transfer_id)
        await self.wait_for("received")
        self.end()


async def good(call: Call) -> None:
    await call.finish(await call.accept())


class World:
    """One life of a decode service. `scripts[address]` are played in order, the last one again and again."""

    def __init__(
        self,
        *,
        pages: int = 12,
        rows: int = 3,
        max_queue: int = 8,
        early: int = 0,
        role: str = "decode",
        stages: int = 1,
        prefix: str = "off",
        drafter: Path | None = None,
    ) -> None:
        """drafter: of decode, which then drafts; prefills have it while `sends_draft`."""
        config = EngineConfig(
            role=role,
            parallel=ParallelConfig(pp=stages, pp_remote_kv=role == "decode" and stages > 1),
            model=ModelConfig(str(NANO), "nano", "float64", "cpu", 64),
            cache=CacheConfig(
                page_tokens=PAGE_TOKENS, pages=pages, state_slots=rows + 2, prefix=prefix
            ),
            schedule=ScheduleConfig(
                max_rows=rows, max_queue=max_queue, depth=2, max_early_prefills=early
            ),
            spec=SpecConfig() if drafter is None else SpecConfig(3, str(drafter)),
        )
        self.sends_draft = drafter is not None
        self.config = replace(
            config, serve=replace(config.serve, prefills=("prefill-*:*", "a:*", "b:*", "c:*"))
        )
        self.deployment = Deployment.of(self.config, "digest")
        self.ranks = Ranks()
        self.scripts: dict[str, list[Script]] = defaultdict(lambda: [good])
        self.calls: list[Call] = []
        self.connects: list[str] = []
        self.connect_gate: asyncio.Event | None = None  # connects wait for it
        self.quiesced: list[int] = []
        self.proof: Callable[[str], Proof | K3Error] = lambda _address: Proof.QUIET
        self.log: list[tuple[str, str]] = []
        self.metrics = DecodeMetrics()
        self._n_requests = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.life = Incarnation(
            self.deployment,
            "decode-test",
            [mover("first")],
            self.ranks,
            lambda _introduction: self,
            self.metrics,
            lambda: None,
        )

    # PrefillSource

    async def connect(self, address: str) -> Pair:
        self.connects.append(address)
        if self.connect_gate is not None:
            await self.connect_gate.wait()
        geometry = prefill_pb2.Geometry(
            pp=1,
            tp=1,
            cp=1,
            stage_bounds=[0, self.deployment.spec.num_layers],
            n_pages=9,
            n_slots=9,
            slot_columns=1,
        )
        return Pair(address, f"prefill-at-{address}", geometry, self.sends_draft)

    def open(self, pair: Pair, deliver: Deliver) -> Call:
        call = Call(self, pair.address, deliver)
        self.calls.append(call)
        scripts = self.scripts[pair.address]
        script = scripts[0] if len(scripts) == 1 else scripts.pop(0)
        task = asyncio.create_task(script(call))
        self._tasks.add(task)
        return call

    async def quiesce(self, pair: Pair, transfer_id: int) -> Proof:
        self.quiesced.append(transfer_id)
        answer = self.proof(pair.address)
        if isinstance(answer, K3Error):
            raise answer
        return answer

    # requests

    def generate(
        self, *addresses: str, n: int = 6, m: int = 4, end_ids: tuple[int, ...] = ()
    ) -> Caller:
        self._n_requests += 1
        spec = RequestSpec(
            RequestId(f"r{self._n_requests}"),
            (1,) * n,
            SamplingParams(temperature=0.0),
            StopParams(m, end_ids),
            candidates=tuple(Candidate(f"prefill-{a}", a) for a in addresses or ("a:1",)),
        )
        return self.life.open(spec)

    async def drain(self, caller: Caller) -> list[Event]:
        """All events of a call; closes it as the service would."""
        events: list[Event] = []
        try:
            while not (events and isinstance(events[-1], Finished | Failed)):
                events.append(await caller.next())
        finally:
            self.life.close(caller, prefill_pb2.ABORT_REASON_CLIENT)
        return events

    async def settle(self, limit_s: float = 600.0) -> None:
        """Wait until nothing is left to look after; fails when the pools do not return to the baseline."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while self.life.n_busy:
            assert asyncio.get_running_loop().time() < deadline, self.life.scheduler.open_requests()
            await asyncio.sleep(0.05)
        load = self.life.load()
        assert load.pages_free == load.pages_total
        assert (load.state_slots_used, load.state_slots_quarantined, load.rows_used) == (0, 0, 0)
        assert load.transfers == 0

    def play(
        self, story: Callable[[World], Coroutine[Any, Any, None]]
    ) -> Coroutine[Any, Any, None]:
        return _play(self, story)


async def _play(world: World, story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    life = asyncio.create_task(world.life.run())
    try:
        await story(world)
    finally:
        world.life.stop()
        try:
            await life
        except GroupFailed:
            assert world.ranks.failure is not None
        for task in world._tasks:
            task.cancel()
        for result in await asyncio.gather(*world._tasks, return_exceptions=True):
            assert not isinstance(result, Exception), result


def mover(name: str) -> plan_pb2.MoverReady:
    return plan_pb2.MoverReady(
        endpoint=prefill_pb2.RankEndpoint(rank=0, agent_name=name), nixl_version="1.5.1"
    )


def ids(tokens: tuple[TokenEvent, ...]) -> list[int]:
    return [token.id for token in tokens]


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for a condition, on the loop's own clock."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (whatever the test wants to know has no event)
            await asyncio.sleep(0.001)
