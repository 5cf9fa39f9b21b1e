"""One rank (`python -m k3.rank`). Joins its group, loads its weights, registers its pools, runs its service's loop.

The front spawned it (`k3/rank/supervise.py`) and is dialled twice: `plan` belongs to the main thread, `transfer` to
the mover. Order of start-up: connections, set-up, device, group, weights, pools, mover, service. It ends with 0 on
Shutdown, and with 1 after a RankError, or when the front is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from k3.cache.layout import CacheLayout, Unit
from k3.cache.storage import Storage
from k3.config import load, speculation
from k3.config.caches import layout_of
from k3.config.stages import mesh_of
from k3.config.tree import EngineConfig
from k3.device import Device, open_device
from k3.model.spec import K3Spec
from k3.parallel import collectives
from k3.parallel.mesh import Mesh, Place
from k3.parallel.shared_memory import share
from k3.rank import loading
from k3.rank.channel import Address, BlockingChannel, parse_address
from k3.rank.context import PlanEnd, RankContext
from k3.rank.mover import Mover, MoverCore
from k3.rank.process import TOKEN_VARIABLE
from k3.transfer.agent import Region, TransferAgent
from k3.transfer.batching import BatchingAgent
from k3.transfer.nixl import NIXL_VERSION, NixlAgent
from k3.transfer.none import LIBRARY, NoAgent
from k3.transfer.plan import Sharding
from k3.transfer.self_test import measure
from k3.v1 import plan_pb2

log = logging.getLogger("k3.rank")

LOOPS = {"prefill": "prefill_svc.rank", "decode": "decode_svc.rank.loop"}
DIAL_S = 10.0
JOIN_S = 120.0
STOP_S = 5.0
PR_SET_PDEATHSIG = 1
PROGRESS_S = 0.2


def main() -> int:
    """Run one rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="k3.rank", description=__doc__)
    parser.add_argument("--service", required=True, choices=sorted(LOOPS))
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--front", required=True, type=parse_address)
    parser.add_argument("--parent", type=int, help="die with this process")
    parser.add_argument("--rendezvous-fd", type=int, help="listening socket of the group's store")
    arguments = parser.parse_args()
    _prepare_process(arguments.parent)
    token = os.environ.pop(TOKEN_VARIABLE, "")
    try:
        plan = _dial(arguments.front, arguments.rank, token, plan_pb2.CONNECTION_PLAN)
        transfer = _dial(arguments.front, arguments.rank, token, plan_pb2.CONNECTION_TRANSFER)
        plans = PlanEnd(plan)
        setup = plans.receive().setup
    except (OSError, EOFError) as error:
        log.error("cannot reach the front: %s", error)
        return 1
    try:
        _serve(arguments, setup, plans, transfer)
    except (EOFError, BrokenPipeError):
        log.error("the front is gone")
        return 1
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        failure = plan_pb2.RankError(message=message, stack=traceback.format_exc())
        plans.send(plan_pb2.RankMessage(error=failure))
        return 1
    return 0


def _prepare_process(parent: int | None) -> None:
    """Dump stacks on SIGUSR1, leave ctrl-C and SIGTERM to the front, do not outlive it."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for left_to_the_front in (signal.SIGINT, signal.SIGTERM):
        signal.signal(left_to_the_front, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if parent is not None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit(1)


def _dial(
    front: Address, rank: int, token: str, connection: plan_pb2.Connection
) -> BlockingChannel:
    channel = BlockingChannel.connect(front, DIAL_S)
    hello = plan_pb2.Hello(rank=rank, pid=os.getpid(), token=token, connection=connection)
    channel.send(plan_pb2.RankMessage(hello=hello))
    return channel


def _serve(
    arguments: argparse.Namespace,
    setup: plan_pb2.Setup,
    plans: PlanEnd,
    transfer: BlockingChannel,
) -> None:
    service, rank = arguments.service, arguments.rank
    config = load.engine_from_json(setup.config_json)
    logging.getLogger().setLevel(config.telemetry.log_level.upper())
    progress = _Progress(plans)
    spec, mesh = K3Spec.from_folder(Path(config.model.path)), mesh_of(config)
    place = mesh.place(rank)
    kind = config.model.device
    device = open_device(kind if kind == "cpu" else f"{kind}:{rank}", config.backends.threads)
    groups = _join(config, place, device, setup.rendezvous, arguments.rendezvous_fd)
    ops = loading.kernels(config, device)
    chosen = asdict(ops.chosen) | {"collectives": type(groups.shard).__name__}
    log.info("kernels chosen: %s", " ".join(f"{part}={name}" for part, name in chosen.items()))
    stage = loading.load_stage(config, place, groups, ops, device, partial(progress.report, "load"))
    layout = layout_of(config, spec, place.stage)
    storage = loading.allocate(config, layout, setup.n_pages, setup.n_slots, device)
    progress.report("allocate", 1, 1)
    geometry, regions = _geometry(mesh, spec, setup, config), _regions(layout, storage)
    mover = Mover(
        partial(_make_core, rank, setup, spec, geometry, layout, config, regions),
        transfer,
        device.recording,
        lambda: _self_test(device, regions, config),
    )
    mover.start()
    loop = importlib.import_module(LOOPS[service])
    loop.run(
        RankContext(
            config=config,
            setup=setup,
            rank=rank,
            spec=spec,
            mesh=mesh,
            groups=groups,
            device=device,
            stage=stage,
            layout=layout,
            storage=storage,
            plans=plans,
            mover=mover,
            draft_context=loading.load_context(config, stage) if service == "prefill" else None,
            drafter=loading.load_drafter(config, stage) if service == "decode" else None,
        )
    )
    mover.stop(STOP_S)
    collectives.leave()


def _join(
    config: EngineConfig, place: Place, device: Device, rendezvous: str, listener: int | None
) -> collectives.Groups:
    """Meet the other ranks of the group. listener: the socket that rank 0 was given."""
    host, _colon, port = rendezvous.rpartition(":")
    is_shared = config.backends.collectives == "shared"
    return collectives.join(
        place,
        host,
        int(port or 0),
        device.collective_backend,
        JOIN_S,
        wrap=partial(share, deadline_s=JOIN_S, n_neighbors=place.mesh.size)
        if is_shared
        else collectives.as_is,
        listener=listener,
    )


class _Progress:
    """Start-up progress for the front, not more often than people can read."""

    def __init__(self, plans: PlanEnd) -> None:
        self._plans = plans
        self._sent_at = 0.0

    def report(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._sent_at < PROGRESS_S:
            return
        self._sent_at = now
        progress = plan_pb2.LoadProgress(stage=stage, done=done, total=total)
        self._plans.send(plan_pb2.RankMessage(progress=progress))


def _geometry(mesh: Mesh, spec: K3Spec, setup: plan_pb2.Setup, config: EngineConfig) -> Sharding:
    bounds = (*(layers.start for layers in mesh.stage_layers(spec.num_layers)), spec.num_layers)
    return Sharding(
        mesh.pp,
        mesh.tp,
        mesh.cp,
        bounds,
        setup.n_pages,
        setup.n_slots,
        speculation.snapshots(config),
        speculation.places(config, spec),
        config.spec.draft_window,
    )


def _self_test(
    device: Device, regions: tuple[Region, ...], config: EngineConfig
) -> plan_pb2.SelfTest | None:
    """The first thing on the mover's thread; None where none is wanted."""
    with device.recording:
        torch.zeros(1, device=device.torch_device).item()  # a GPU's context is this thread's now
    floor = config.transfer.min_bandwidth
    if not floor or config.role == "both":
        return None
    return measure(regions, floor, device.recording)


def _make_core(
    rank: int,
    setup: plan_pb2.Setup,
    spec: K3Spec,
    geometry: Sharding,
    layout: CacheLayout,
    config: EngineConfig,
    regions: tuple[Region, ...],
    self_test: plan_pb2.SelfTest | None,
) -> MoverCore:
    """Runs on the mover's thread."""
    has_gpu = any(region.memory == "VRAM" for region in regions)
    is_alone, name = config.role == "both", f"{setup.instance_id}-r{rank}"

    def build() -> TransferAgent:
        if is_alone:
            return NoAgent(name)
        own = NixlAgent(name, is_batched=has_gpu)
        own.check_idle_cpu()
        agent = BatchingAgent(own, lambda: NixlAgent(name)) if has_gpu else own
        agent.register(regions)
        return agent

    return MoverCore(
        rank=rank,
        spec=spec,
        geometry=geometry,
        layout=layout,
        config=config.transfer,
        build=build,
        library_version=LIBRARY if is_alone else NIXL_VERSION,
        now=time.monotonic(),
        self_test=self_test,
    )


def _regions(layout: CacheLayout, storage: Storage) -> tuple[Region, ...]:
    """The pools as the transfer sees them."""
    regions: list[Region] = []
    for field in layout.fields:
        pool = storage.pools[field.name]
        is_gpu = pool.device.type == "cuda"
        units = storage.n_pages if field.unit is Unit.PAGE else storage.n_slots * field.columns
        regions.append(
            Region(
                field.name,
                pool.data_ptr(),
                pool.device.index if is_gpu else 0,
                "VRAM" if is_gpu else "DRAM",
                field.unit_bytes,
                units,
            )
        )
    return tuple(regions)
