"""`k3-decode`: parse and judge the configuration, build the engine, serve until asked to stop."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc.aio

from decode_svc.deployment import Deployment
from decode_svc.driver import DecodeEngine
from decode_svc.service import SERVICE_NAME, DecodeServicer
from k3.config import load
from k3.config.tree import EngineConfig
from k3.model.digest import model_digest
from k3.rank.lives import OnProgress
from k3.rank.supervise import RankGroup
from k3.rpc.client import ChannelPool, client_tls
from k3.rpc.engine import run, serve
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import decode_pb2_grpc, plan_pb2


def main() -> None:
    """Entry point. Exit codes: 0 ok, 2 configuration, 3 model load, 4 port in use, 1 other."""
    config = load.engine_config("decode", sys.argv[1:])
    sys.exit(run(config, _serve(config)))


async def _serve(config: EngineConfig) -> int:
    deployment = Deployment.of(config, model_digest(Path(config.model.path)))

    def make_group(setup: plan_pb2.Setup, on_progress: OnProgress) -> RankGroup:
        return RankGroup("decode", config, setup, deployment.n_ranks, on_progress=on_progress)

    tls = client_tls(config.serve.tls_ca, config.serve.tls_cert, config.serve.tls_key)
    engine = DecodeEngine(deployment, make_group, ChannelPool(tls), DecodeMetrics())

    def add_services(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(engine), server)

    pages = {"/admin/ledger": engine.ledger, "/admin/drafts": engine.drafts}
    return await serve(engine, config, add_services, (SERVICE_NAME,), engine.metrics, pages)


if __name__ == "__main__":
    main()
