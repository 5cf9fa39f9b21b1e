"""`python -m decode_svc.rank.alone`: a rank that prefills for itself, in one process, without services or a transfer.

The yardstick of a hand-over: every request's caches and context rows are written straight to where they are read. Flags
are those of `k3-decode`. Requests come as JSON lines on stdin until its end:
`{"prompt": [ids], "max_tokens": n, "end_ids": [ids], "temperature": t, "seed": n}`. Answers leave as JSON lines in the
same order, `{"ids": [ids], "histogram": [steps by accepted drafts] or null}`, then one of the whole run:
`{"seconds", "fill_s", "n_steps", "step_s", "forward_s"}`. `k3-bench spec --compare` runs it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decode_svc import wire
from decode_svc.deployment import Deployment
from decode_svc.rank.graphs import GraphRunner
from decode_svc.rank.loop import DecodeRank, Launched
from decode_svc.request import DecodeRequest, RequestSpec
from k3.config import load, speculation
from k3.config.caches import layout_of
from k3.config.tree import EngineConfig
from k3.device import open_device
from k3.errors import ConfigError
from k3.model.batch import ChunkBatch
from k3.model.draft_ring import DraftRing
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from k3.rank import loading
from k3.rank.context import PlanEnd, RankContext, StepEvent
from k3.sampling import RowSampling, sample
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent
from k3.v1 import plan_pb2


@dataclass(slots=True)
class Totals:
    """Of a run. fill_s: in prefill. step_s and forward_s are summed over its decode steps."""

    seconds: float = 0.0
    fill_s: float = 0.0
    n_steps: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0


class Unheard(PlanEnd):
    """The plan connection of a rank whose front is this process: nobody has to hear what it says."""

    def __init__(self) -> None:
        """No channel."""

    def send(self, message: plan_pb2.RankMessage) -> None:
        """Drop it: progress of the warm-up."""


class NoMover:
    """Nothing is sent, so nobody waits for a step's pages."""

    def step_done(self, step_id: int, event: StepEvent) -> None:
        """Ignore it."""


class Alone:
    """One rank under the service's own scheduler. `config` is that of a decode service with one rank."""

    def __init__(self, config: EngineConfig) -> None:
        """Load everything. Raises ConfigError for more ranks than one, ModelError."""
        if config.parallel.tp * config.parallel.cp * config.parallel.pp != 1:
            raise ConfigError(
                f"{config.parallel}: one process is one rank; leave pp, tp and cp at 1"
            )
        self.config = config
        self.scheduler = Deployment.of(config, "alone").scheduler()
        self.totals = Totals()
        spec = K3Spec.from_folder(Path(config.model.path))
        device, groups = open_device(config.model.device, config.backends.threads), solo_groups()
        self._device = device.torch_device
        ops = loading.kernels(config, device)
        self._stage = loading.load_stage(config, SOLO, groups, ops, device)
        layout, cache = layout_of(config, spec, 0), config.cache
        self._storage = loading.allocate(config, layout, cache.pages, cache.state_slots, device)
        self._drafter = loading.load_drafter(config, self._stage)
        self._ring = None
        if self._drafter is not None:
            assert self._storage.draft is not None, "a layout with draft places has their pool"
            places = speculation.places(config, spec)
            self._ring = DraftRing(self._storage.draft, places, config.spec.draft_window)
        self._rank = DecodeRank(
            RankContext(
                config=config,
                setup=plan_pb2.Setup(),
                rank=0,
                spec=spec,
                mesh=SOLO.mesh,
                groups=groups,
                device=device,
                stage=self._stage,
                layout=layout,
                storage=self._storage,
                plans=Unheard(),
                mover=NoMover(),
                drafter=self._drafter,
            )
        )
        self._rank.warm_up()

    @property
    def runner(self) -> GraphRunner:
        """How the rank launches steps."""
        return self._rank.runner

    def answer(self, specs: Sequence[RequestSpec]) -> list[DecodeRequest]:
        """Serve all, as many at once as the configuration has rows. Raises RequestRejected, QueueFull."""
        started = time.perf_counter()
        launched: deque[Launched] = deque()
        requests = [self.scheduler.submit(spec, 0.0) for spec in specs]
        while self.scheduler.open_requests():
            for request in self.scheduler.admit(0.0):
                self._fill(request)
            plan = self.scheduler.plan()
            if plan is not None:
                launched.append(self._rank.launch(wire.step_plan(plan)))
            # a device that is still busy gets another step before the answer is read
            if launched and (plan is None or launched[0].event.query()):
                self._absorb(self._rank.answer(launched.popleft()))
        self.totals.seconds += time.perf_counter() - started
        return requests

    def _absorb(self, result: plan_pb2.StepResult) -> None:
        self.totals.n_steps += 1
        self.totals.step_s += result.step_s
        self.totals.forward_s += result.forward_s
        self.scheduler.advance(result.step_id, wire.emitted(result))

    def _fill(self, request: DecodeRequest) -> None:
        """Prefill in place, then hand the request to its row."""
        started = time.perf_counter()
        self.scheduler.fill(request)
        first = self._prefill(request)
        self.totals.fill_s += time.perf_counter() - started
        request.draft_valid = self._drafter is not None
        if self.scheduler.first_token(request, first).finish is None:
            self.scheduler.filled(request)
            return
        hold = self.scheduler.drop(request)
        if hold is not None:
            self.scheduler.settle(hold)  # nobody writes from outside

    @torch.inference_mode()
    def _prefill(self, request: DecodeRequest) -> TokenEvent:
        """The first token; caches and context rows of the whole prompt are in place."""
        prompt, held, stage = request.spec.prompt, request.held, self._stage
        slot, p, n = held.state_slot, self.config.cache.page_tokens, len(prompt)
        pages = torch.tensor(held.pages, dtype=torch.int32, device=self._device)
        hidden = torch.empty(0)
        for at in range(0, n, self.config.schedule.token_budget):
            ids = prompt[at : at + self.config.schedule.token_budget]
            position_T = torch.arange(at, at + len(ids), device=self._device)
            batch = ChunkBatch(
                token_ids_T=torch.tensor(ids, device=self._device),
                cu_lens=(0, len(ids)),
                starts=(at,),
                page_table_RW=pages.unsqueeze(0),
                slot_T=pages[position_T // p].long() * p + position_T % p,
                read_slots=(slot if at else -1,),
                write_slots=(slot,),
            )
            output = stage.forward(None, self._storage.caches(), batch)
            hidden = stage.hidden(output.frame)[-1:]
            if self._drafter is not None and self._ring is not None:
                rows = self._drafter.context(output.taps_TXD, position_T)
                keep_T = position_T >= n - self._ring.window
                self._ring.write(rows, torch.full_like(position_T, slot), position_T, keep_T)
        how = RowSampling(request.spec.sampling, request.spec.stop.end_ids, output_start=n)
        [first] = sample(stage.logits(hidden), [how], [n])
        return first


def request_spec(number: int, line: str) -> RequestSpec:
    """A request of stdin. Raises ConfigError for a line that is none."""
    try:
        fields: dict[str, Any] = json.loads(line)
        sampling = SamplingParams(temperature=fields["temperature"], seed=fields["seed"])
        stop = StopParams(fields["max_tokens"], tuple(fields["end_ids"]))
        return RequestSpec(RequestId(str(number)), tuple(fields["prompt"]), sampling, stop)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"line {number}: {error!r}; expected prompt, max_tokens, end_ids, temperature and seed"
        ) from error


def main() -> None:
    """Entry point."""
    config = load.engine_config("decode", sys.argv[1:])
    specs = [request_spec(i, line) for i, line in enumerate(sys.stdin, start=1)]
    alone = Alone(config)
    for request in alone.answer(specs):
        total = request.drafts.total
        answer = {
            "ids": [token.id for token in request.outputs],
            "histogram": None if total is None else list(total.histogram),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.write(json.dumps(asdict(alone.totals)) + "\n")


if __name__ == "__main__":
    main()
