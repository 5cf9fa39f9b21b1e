"""Health of an engine: a status is told once for each change, and asked for by name."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2

from k3.errors import NotFound
from k3.rpc.health import HealthServicer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
ASKED = health_pb2.HealthCheckRequest(service="decode")


async def test_a_watcher_hears_of_changes_alone_and_skips_what_it_slept_through() -> None:
    health, heard = HealthServicer(), []
    watch = health.Watch(ASKED, None)
    heard.append((await anext(watch)).status)
    health.set("decode", SERVING)
    heard.append((await anext(watch)).status)
    later = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    health.set("prefill", NOT_SERVING)
    assert not (await asyncio.wait({later}, timeout=0.02))[0]
    health.set("decode", NOT_SERVING)
    heard.append((await later).status)
    health.set("decode", SERVING)
    health.set("decode", NOT_SERVING)
    health.set("decode", UNKNOWN)
    heard.append((await anext(watch)).status)
    assert heard == [UNKNOWN, SERVING, NOT_SERVING, UNKNOWN]


async def test_a_service_nobody_spoke_of_is_not_found() -> None:
    with pytest.raises(NotFound, match="service='decode': expected one of ''"):
        await HealthServicer().Check(ASKED, None)
