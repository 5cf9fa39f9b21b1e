"""Health, readiness, version and metrics of the router."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from k3.telemetry.declare import encode
from router.fleet.circuit import CircuitState
from router.fleet.instance import Role
from router.openai.models import json_response
from router.openai.serving import Serving

CIRCUIT_VALUES: Mapping[CircuitState, int] = {
    CircuitState.CLOSED: 0,
    CircuitState.HALF_OPEN: 1,
    CircuitState.OPEN: 2,
}


def reasons_not_ready(serving: Serving) -> list[dict[str, str]]:
    """Why no request could be served now; empty when one could."""
    reasons: list[dict[str, str]] = []
    if serving.lifecycle.is_draining:
        reasons.append({"code": "draining", "detail": "the router is on its way out"})
    live = serving.registry.live_decode()
    for role in (Role.DECODE, Role.PREFILL) if live is None else ():
        if not serving.registry.usable(role):
            known = [
                f"{instance.address} is {instance.state.value}"
                + (f" ({instance.reason})" if instance.reason else "")
                for instance in serving.registry.instances
                if instance.role is role
            ]
            detail = "; ".join(known) or f"no {role.value} instance is registered"
            reasons.append({"code": f"no_{role.value}_available", "detail": detail})
    if not reasons and live is None:
        detail = "no decode instance has the cache layout and the weights of a prefill instance"
        reasons.append({"code": "incompatible", "detail": detail})
    return reasons


async def health(request: Request) -> Response:
    """The event loop runs."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether a request would be served."""
    reasons = reasons_not_ready(request.app.state.serving)
    return json_response({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


async def startup(request: Request) -> Response:
    """The router has loaded its tokenizer before it listens."""
    return json_response({"status": "started"})


async def version(request: Request) -> Response:
    """Versions and fingerprints of the router and of every usable instance."""
    serving: Serving = request.app.state.serving
    identities = [
        identity
        for role in Role
        for instance in serving.registry.usable(role)
        if (identity := instance.identity) is not None
    ]
    live = serving.registry.live_decode()
    return json_response(
        {
            "version": serving.version,
            "config_hash": serving.config_hash,
            "layout_fingerprint": live.layout_fingerprint if live else None,
            "system_fingerprint": serving.fingerprint(),
            "instances": [
                {
                    "id": identity.instance_id,
                    "version": identity.version,
                    "config_hash": identity.config_hash,
                    "model_digest": identity.model_digest,
                    "layout_fingerprint": identity.layout_fingerprint,
                    "draft_fingerprint": identity.draft_fingerprint,
                }
                for identity in identities
            ],
        }
    )


async def metrics(request: Request) -> Response:
    """Prometheus text, or OpenMetrics by `Accept`."""
    serving: Serving = request.app.state.serving
    _show(serving)
    body, content_type = encode(serving.metrics.registry, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


def _show(serving: Serving) -> None:
    """Set the gauges from what is now."""
    shown, now = serving.metrics, time.monotonic()
    shown.queue_depth.set(serving.admission.queue_depth)
    shown.common.ready.set(not reasons_not_ready(serving))
    shown.common.draining.set(serving.lifecycle.is_draining)
    shown.instance_in_flight.clear()
    shown.circuit_state.clear()
    shown.cache_stale.clear()
    shown.cache_pages.clear()
    for role in Role:
        shown.instance_up.labels(role.value).set(len(serving.registry.usable(role)))
    for instance in serving.registry.instances:
        shown.instance_in_flight.labels(instance.instance_id).set(instance.in_flight)
        value = CIRCUIT_VALUES[instance.circuit.state(now)]
        shown.circuit_state.labels(instance.instance_id).set(value)
        if instance.role is Role.PREFILL or instance.cache.is_there:
            is_stale = not instance.is_cache_known(now)
            shown.cache_stale.labels(instance.instance_id).set(is_stale)
            shown.cache_pages.labels(instance.instance_id).set(instance.cache.n_pages)


OPS_ROUTES: Mapping[str, Any] = {
    "/health": health,
    "/healthz": health,
    "/livez": health,
    "/ping": health,
    "/ready": ready,
    "/readyz": ready,
    "/startup": startup,
    "/version": version,
    "/metrics": metrics,
}
