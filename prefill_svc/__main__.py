"""`k3-prefill`: parse and judge the configuration, build the engine, serve until asked to stop."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc.aio

from k3.config import load
from k3.config.tree import EngineConfig
from k3.model.digest import model_digest
from k3.rank.lives import OnProgress
from k3.rank.supervise import RankGroup
from k3.rpc.engine import run, serve
from k3.telemetry.metrics import PrefillMetrics
from k3.v1 import plan_pb2, prefill_pb2_grpc
from prefill_svc.deployment import Deployment
from prefill_svc.driver import PrefillEngine
from prefill_svc.service import SERVICE_NAME, PrefillServicer


def main() -> None:
    """Entry point. Exit codes: 0 ok, 2 configuration, 3 model load, 4 port in use, 1 other."""
    config = load.engine_config("prefill", sys.argv[1:])
    sys.exit(run(config, _serve(config)))


async def _serve(config: EngineConfig) -> int:
    deployment = Deployment.of(config, model_digest(Path(config.model.path)))

    def make_group(setup: plan_pb2.Setup, on_progress: OnProgress) -> RankGroup:
        return RankGroup("prefill", config, setup, deployment.n_ranks, on_progress=on_progress)

    metrics = PrefillMetrics()
    engine = PrefillEngine(deployment, make_group, metrics)

    def add_services(server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(engine), server)

    return await serve(engine, config, add_services, (SERVICE_NAME,), metrics)


if __name__ == "__main__":
    main()
