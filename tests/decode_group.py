"""A decode instance without processes: real `DecodeRank`s, a thread each, under the service's own scheduler and wire.

A `DecodeGroup` admits requests, deals what was computed of their prompts (`tests/prefilled.py`) out to its ranks, and
keeps `depth` plans launched before it looks at the oldest answer, as a device that lags behind would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from decode_svc import wire
from decode_svc.deployment import Deployment
from decode_svc.rank.graphs import Eager, GraphRunner
from decode_svc.rank.loop import DecodeRank, Launched
from decode_svc.rank.rows import RowTable
from decode_svc.rank.step import apply_rows
from decode_svc.request import DecodeRequest, RequestSpec, State
from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.config import speculation
from k3.config.tree import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpecConfig,
)
from k3.device import CpuDevice
from k3.model.dspark import Drafter, open_drafter
from k3.model.dspark_spec import DraftSpec
from k3.model.k3 import Stage
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh, Place
from k3.rank.context import RankContext
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent
from k3.v1 import plan_pb2
from tests.model_runner import CPU, OPS
from tests.prefilled import PAGE, deal
from tests.thread_group import mesh_groups, run_group


@dataclass(frozen=True, slots=True)
class Model:
    """Weights of every rank of a group; shared by its instances. `drafters` are those of the last stage, if any."""

    folder: Path
    mesh: Mesh
    drafter: Path | None
    stages: tuple[Stage, ...]
    drafters: tuple[Drafter, ...]
    dtype: str

    @classmethod
    def open(
        cls,
        folder: Path,
        mesh: Mesh,
        drafter: Path | None = None,
        *,
        draft_tokens: int = 7,
        dtype: str = "float64",
        exchange: str = "value",
        confidence: bool = False,
    ) -> Model:
        """Load every rank's share. confidence: the drafter's confidence head too."""
        draft = DraftSpec.from_folder(drafter) if drafter is not None else None
        groups = mesh_groups(mesh)
        stages = tuple(
            open_stage(
                folder,
                mesh.place(rank),
                groups[rank],
                OPS,
                dtype=dtype,
                device=CPU,
                exchange=exchange,
                taps=draft.taps if draft is not None else (),
                tap_stream=draft.tap_stream if draft is not None else "prefix",
                shared_embedding=draft is not None,
            )
            for rank in range(mesh.size)
        )
        drafters: list[Drafter] = []
        for stage in stages if drafter is not None else ():
            assert drafter is not None
            if not stage.place.is_last:
                continue
            assert stage.embed is not None
            assert stage.head is not None
            drafters.append(
                open_drafter(
                    drafter,
                    stage.place.shard,
                    stage.groups.shard,
                    draft_tokens=draft_tokens,
                    embed=stage.embed,
                    head=stage.head,
                    dtype=dtype,
                    device=CPU,
                    ops=OPS.dense,
                    confidence=confidence,
                )
            )
        return cls(folder, mesh, drafter, stages, tuple(drafters), dtype)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: what prefill sent of it (without `draft` it starts cold), its first token, how many tokens it wants.

    leaves_after: tokens after which the client goes away, for ever or to ask again; 0 = stays. draft_tokens: a step
    checks at most.
    """

    prompt: Sequence[int]
    sent: Mapping[str, Tensor]
    first: TokenEvent
    params: SamplingParams
    n_tokens: int
    leaves_after: int = 0
    draft_tokens: int | None = None


class Heard:
    """The front's end of the plan connection: hears what a rank says of itself."""

    def __init__(self) -> None:
        self.said: list[plan_pb2.RankMessage] = []

    def send(self, message: plan_pb2.RankMessage) -> None:
        self.said.append(message)


class DecodeGroup:
    """One life of a decode instance."""

    def __init__(
        self,
        model: Model,
        *,
        max_rows: int,
        max_len: int,
        depth: int,
        draft_tokens: int = 7,
        window: int = 16,
        page_tokens: int = PAGE,
        runner: Callable[[], GraphRunner] = Eager,
        too_high: int = 0,
        more: Mapping[str, Any] | None = None,
        warms_up: bool = True,
        role: str = "decode",
        cache: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
    ) -> None:
        """runner: how each rank launches its steps. more: further settings of `spec`; cache, schedule: of those.

        warms_up: as a service does at its start; else only the dummy slot is made clean.

        too_high: tokens by which every bound the ranks are told exceeds the scheduler's own.
        """
        mesh = model.mesh
        spec = K3Spec.from_folder(model.folder)
        is_drafting = model.drafter is not None
        per_request = -(-(max_len + 4 * (1 + draft_tokens)) // (page_tokens * mesh.cp))
        self.config = EngineConfig(
            role=role,
            model=ModelConfig(str(model.folder), "model", model.dtype, "cpu", max_len),
            parallel=ParallelConfig(pp=mesh.pp, tp=mesh.tp, cp=mesh.cp),
            cache=CacheConfig(
                **{
                    "page_tokens": page_tokens,
                    "pages": max_rows * per_request,
                    "state_slots": max_rows + 1,
                    **(cache or {}),
                }
            ),
            schedule=ScheduleConfig(max_rows=max_rows, depth=depth, **(schedule or {})),
            spec=SpecConfig(draft_tokens, str(model.drafter), window, **(more or {}))
            if is_drafting
            else SpecConfig(**(more or {})),
        )
        self.model = model
        self._runner = runner
        self._too_high = too_high
        self.scheduler = Deployment.of(self.config, "digest").scheduler()
        self.storages = [self._storage(spec, mesh.place(rank)) for rank in range(mesh.size)]
        self._answering = mesh.rank(mesh.pp - 1)
        self.ranks = [self._rank(rank, spec) for rank in range(mesh.size)]
        if warms_up:
            run_group(mesh.size, lambda rank: self.ranks[rank].warm_up())
        else:
            for storage in self.storages:
                storage.zero_slot(0)
        self._launched: deque[Launched] = deque()
        self._asked: dict[int, Ask] = {}
        self._requests: list[DecodeRequest] = []

    def _storage(self, spec: K3Spec, place: Place) -> Storage:
        config = self.config
        layout = build_layout(
            spec,
            self.model.mesh,
            place.stage,
            page_tokens=config.cache.page_tokens,
            dtype=self.model.dtype,
            columns=speculation.snapshots(config),
            records=speculation.records(config),
            draft=speculation.drafter(config),
            draft_places=speculation.places(config, spec),
            keeps_context=speculation.keeps_context(config),
        )
        return Storage(
            layout,
            config.cache.pages,
            config.cache.state_slots,
            CPU,
            n_rings=speculation.rings(config),
            fill_nan=True,
        )

    def _rank(self, rank: int, spec: K3Spec) -> DecodeRank:
        model, config, storage = self.model, self.config, self.storages[rank]
        stage = model.stages[rank]
        return DecodeRank(
            RankContext(
                config=config,
                setup=plan_pb2.Setup(),
                rank=rank,
                spec=spec,
                mesh=model.mesh,
                groups=stage.groups,
                device=CpuDevice(1),
                stage=stage,
                layout=storage.layout,
                storage=storage,
                plans=Heard(),  # type: ignore[arg-type]
                mover=None,  # type: ignore[arg-type]
                drafter=model.drafters[stage.place.shard.index]
                if model.drafters and stage.place.is_last
                else None,
            ),
            self._runner(),
        )

    # ---------------------------------------------------------------- the front

    def submit(self, ask: Ask) -> DecodeRequest:
        """A request joins the queue."""
        name = RequestId(f"r{len(self._asked)}")
        stop = StopParams(ask.n_tokens)
        spec = RequestSpec(name, tuple(ask.prompt), ask.params, stop, draft_tokens=ask.draft_tokens)
        request = self.scheduler.submit(spec, 0.0)
        self._asked[request.key] = ask
        self._requests.append(request)
        return request

    def accepted(self) -> list[int]:
        """Steps by the number of drafts they accepted, over all requests."""
        totals = [request.drafts.total for request in self._requests]
        return [sum(n) for n in zip(*(total.histogram for total in totals if total), strict=True)]

    def running(self) -> list[DecodeRequest]:
        """Requests whose drafts lie in the row tables."""
        return [r for r in self.scheduler.open_requests() if r.state is State.RUNNING]

    def tables(self) -> list[RowTable]:
        """Row table of every rank."""
        return [rank._table for rank in self.ranks]

    def open_rows(self, requests: Sequence[DecodeRequest]) -> None:
        """Fill and open the rows of queued requests without running a step."""
        self._admit()
        plan = plan_pb2.StepPlan(open_rows=[wire.open_row(r) for r in requests])
        for rank in self.ranks:
            apply_rows(rank._table, plan)
            rank._step.open([r.held.row.index for r in requests], max(r.base for r in requests))

    def play(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Answers of all, in their order. One that leaves half-way asks again at once, as another request."""
        requests = [self.submit(ask) for ask in asks]
        while self.scheduler.open_requests():
            self.step(requests)
        assert self.scheduler.memory.page_counts().held == 0
        return [[token.id for token in request.outputs] for request in requests]

    def step(self, requests: list[DecodeRequest]) -> None:
        """Let in what fits, keep `depth` plans launched, absorb the oldest answer."""
        self._admit()
        while (plan := self.scheduler.plan()) is not None:
            self._launched.append(self._launch(wire.step_plan(plan)))
        if self._launched:
            launched = self._launched.popleft()
            result = self.ranks[self._answering].answer(launched)
            self.scheduler.advance(result.step_id, wire.emitted(result))
        for i, request in enumerate(requests):
            ask = self._asked[request.key]
            if request.state is State.RUNNING and 0 < ask.leaves_after <= len(request.outputs):
                self.scheduler.abort(request)
                requests[i] = self.submit(replace(ask, leaves_after=0))

    def _admit(self) -> None:
        for request in self.scheduler.admit(0.0):
            self._deal(request)

    def _deal(self, request: DecodeRequest) -> None:
        """A prefill instance fills the reservation."""
        ask = self._asked[request.key]
        self.scheduler.fill(request)
        for rank, storage in enumerate(self.storages):
            deal(
                ask.sent,
                storage,
                self.model.mesh.place(rank),
                request.held.pages,
                request.held.state_slot,
                self.config.spec.draft_window,
                len(ask.prompt),
            )
        request.draft_valid = "draft" in ask.sent
        assert self.scheduler.first_token(request, ask.first).finish is None
        self.scheduler.filled(request)

    def _launch(self, plan: plan_pb2.StepPlan) -> Launched:
        for row in plan.verify_rows:
            row.base_bound += self._too_high
        return self._launch_each([plan] * len(self.ranks))

    def _launch_each(self, plans: list[plan_pb2.StepPlan]) -> Launched:
        """Every rank its plan, its own message as over the wire: threads that share one may free its parts twice."""
        wires = [plan.SerializeToString() for plan in plans]

        def launch(rank: int) -> Launched:
            return self.ranks[rank].launch(plan_pb2.StepPlan.FromString(wires[rank]))

        return run_group(len(self.ranks), launch)[self._answering]
