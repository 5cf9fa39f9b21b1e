"""What every endpoint needs, built once, and the response that runs a generation.

A generation ends in one of five ways: its work is done, it failed, the client went away, somebody here ended it, or its
deadline passed. `GenerationResponse` waits for the first of these, cancels the rest, and answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from k3.errors import DeadlineExceeded
from k3.telemetry import tracing
from k3.telemetry.metrics import RouterMetrics
from router.admission import Admission
from router.auth import PRINCIPAL
from router.fleet.attempt import Dispatcher
from router.fleet.instance import Role
from router.fleet.pairing import capacity_tokens
from router.fleet.registry import Registry
from router.lifecycle import Lifecycle
from router.openai.answer import ChatAnswer, Head, TextAnswer
from router.openai.body import BodyReader
from router.openai.errors import ApiError, api_error, model_not_found
from router.openai.generation import Counts, Generation
from router.openai.params import Caller, Job, Limits, Settings, session_of, timeout_s
from router.openai.schemas import GenerationBody
from router.openai.sse import JsonOutlet, SseOutlet
from router.requests import OpenRequest, RequestTable
from router.text.folder import ModelFolder
from router.text.threads import TextThreads

log = logging.getLogger("k3.router")
T = TypeVar("T")
# Error codes of admission, and the reason its counter names.
REJECTIONS: Mapping[str, str] = {
    "queue_full": "queue_full",
    "queue_timeout": "queue_timeout",
    "capacity_exceeded": "capacity_exceeded",
    "no_decode_available": "no_instance",
    "no_prefill_available": "no_instance",
    "draining": "draining",
}


@dataclass(frozen=True, slots=True)
class Serving:
    """The router's parts, as the endpoints use them."""

    settings: Settings
    registry: Registry
    admission: Admission
    dispatcher: Dispatcher
    requests: RequestTable
    lifecycle: Lifecycle
    metrics: RouterMetrics
    reader: BodyReader
    texts: TextThreads
    created: int
    version: str
    config_hash: str

    @property
    def folder(self) -> ModelFolder:
        """The served model."""
        return self.settings.folder

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not served here."""
        if name is not None and name != self.folder.name:
            raise model_not_found(name)

    def limits(self) -> Limits:
        """Of the instances that are usable now; before any is, the model's own."""
        views = self.registry.decode_views()
        own = self.folder.max_model_len
        return Limits(
            max_model_len=min([own, *(view.max_model_len for view in views)]),
            capacity_tokens=max((capacity_tokens(view) for view in views), default=own),
        )

    def fingerprint(self) -> str:
        """Names code, weights and configuration of the decode instances in use."""
        identities = [instance.identity for instance in self.registry.usable(Role.DECODE)]
        parts = sorted({f"{i.model_digest} {i.config_hash}" for i in identities if i})
        return "fp_" + hashlib.sha256("\n".join((self.version, *parts)).encode()).hexdigest()[:10]

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run rendering and tokenizing beside the event loop. Raises QueueFull."""
        return await self.texts.run(work)

    def count_error(self, code: str | None) -> None:
        """One more error answer; the code says whether it turned a request away."""
        code = code or "internal_error"
        self.metrics.errors.labels(code).inc()
        if code in REJECTIONS:
            self.metrics.rejected.labels(REJECTIONS[code]).inc()


B = TypeVar("B", bound=GenerationBody)


async def generate(
    request: Request,
    body_type: type[B],
    make_job: Callable[[B, Settings, Limits, Caller], Job],
    path: str,
) -> Response:
    """What every generating endpoint does: read the body, look who asks, make the job; the response runs it."""
    serving: Serving = request.app.state.serving
    body = await serving.reader.read(request, body_type)
    arrived = time.monotonic()
    serving.check_model(body.model)
    serving.lifecycle.check_open()
    caller = Caller(
        request.scope[PRINCIPAL],
        session_of(request.headers),
        timeout_s(
            body.timeout_ms,
            request.headers.get("x-request-timeout-ms"),
            serving.settings.http.request_timeout_s,
        ),
    )
    build = partial(make_job, body, serving.settings, serving.limits(), caller)
    with serving.requests.preparing():
        return GenerationResponse(serving, await serving.in_thread(build), path, arrived)


class GenerationResponse(Response):
    """Runs one job when it is sent. arrived: when its body was there, monotonic seconds."""

    def __init__(self, serving: Serving, job: Job, path: str, arrived: float) -> None:
        super().__init__()
        self._arrived = arrived
        self._serving = serving
        self._job = job
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the generation."""
        serving, job = self._serving, self._job
        running = tracing.current()
        request_id = running.request_id if running else f"req-{uuid.uuid4().hex}"
        n_prompt_tokens = sum(len(prompt) for prompt in job.prompts)
        with serving.requests.open(request_id, job.model, self._path, n_prompt_tokens) as request:
            serving.metrics.in_flight.inc()
            generation = Generation(
                job, request, serving.dispatcher, serving.folder, serving.metrics, self._arrived
            )
            outlet = self._outlet(send, generation)
            try:
                error = await self._race(generation, outlet, receive)
                if error is not None:
                    await outlet.fail(error)
            except ClientGone:
                serving.metrics.cancelled.labels(request.stage.value).inc()
                self._log(generation, "cancelled", "client_closed_request")
            else:
                self._log(generation, "error" if error else "done", error.code if error else None)
            finally:
                serving.metrics.in_flight.dec()

    async def _race(
        self, generation: Generation, outlet: JsonOutlet | SseOutlet, receive: Receive
    ) -> ApiError | None:
        """Run until the first way to end. None: the answer is complete. Raises ClientGone."""
        request = generation.request
        work = asyncio.create_task(self._work(generation, outlet))
        gone = asyncio.create_task(_disconnected(receive))
        helpers = [work, gone]
        if isinstance(outlet, SseOutlet):
            interval_s = self._serving.settings.http.sse_heartbeat_s
            helpers.append(asyncio.create_task(outlet.heartbeat(interval_s)))
        try:
            await asyncio.wait(
                {work, gone, request.ended_by},
                timeout=max(generation.deadline - time.monotonic(), 0),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            is_done, is_gone = work.done(), gone.done()
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        if is_done:
            failure = asyncio.CancelledError() if work.cancelled() else work.exception()
            return self._failure(failure, request) if failure else None
        if is_gone:
            raise ClientGone
        if request.ended_by.done():
            return api_error(request.ended_by.result())
        limit = DeadlineExceeded(f"the request took longer than {self._job.timeout_s:g} s")
        return api_error(limit)

    async def _work(self, generation: Generation, outlet: JsonOutlet | SseOutlet) -> None:
        await generation.run(outlet.update)
        await outlet.done({"Server-Timing": _server_timing(generation)})

    def _failure(self, failure: BaseException, request: OpenRequest) -> ApiError:
        error = api_error(failure)
        if error.status == 500:
            log.error(
                "request failed by a bug",
                extra={"request_id": request.request_id},
                exc_info=failure,
            )
        return error

    def _outlet(self, send: Send, generation: Generation) -> JsonOutlet | SseOutlet:
        job, serving = self._job, self._serving
        kind = "chatcmpl" if job.is_chat else "cmpl"
        head = Head(
            f"{kind}-{uuid.uuid4().hex}", int(time.time()), job.model, serving.fingerprint()
        )
        shapes = ChatAnswer if job.is_chat else TextAnswer
        answer = shapes(head, job, serving.folder.tokenizer)
        headers = {"X-Seed": str(job.sampling.seed)}

        def counts() -> Counts:
            return generation.counts

        if job.is_stream:
            return SseOutlet(
                send,
                answer,
                counts,
                headers,
                include_usage=job.include_usage,
                continuous=job.continuous_usage,
            )
        return JsonOutlet(send, answer, job.n_choices, counts, headers)

    def _log(self, generation: Generation, outcome: str, code: str | None) -> None:
        """The one line, and the metrics, of a finished request."""
        metrics, counts = self._serving.metrics, generation.counts
        first = generation.choices[0]
        seconds = time.monotonic() - generation.started
        if outcome == "done":
            metrics.e2e_s.observe(seconds)
            metrics.prompt_tokens.inc(counts.prompt_tokens)
            metrics.cached_tokens.inc(counts.cached_tokens)
            for choice in generation.choices:
                metrics.finish.labels(choice.end.finish_reason if choice.end else "error").inc()
            for stage, value in _stages(generation).items():
                metrics.stage_s.labels(stage).observe(value)
        else:
            metrics.finish.labels(outcome).inc()
            if outcome == "error":
                self._serving.count_error(code)
        metrics.generation_tokens.inc(counts.completion_tokens)
        ends = sorted({choice.end.finish_reason for choice in generation.choices if choice.end})
        log.info(
            "request finished",
            extra={
                "request_id": generation.request.request_id,
                "path": self._path,
                "outcome": outcome,
                "finish": ",".join(ends),
                "error_code": code,
                "prompt_tokens": counts.prompt_tokens,
                "completion_tokens": counts.completion_tokens,
                "cached_tokens": counts.cached_tokens,
                "decode": first.trace.decode_id,
                "prefill": first.trace.prefill_id,
                "n_calls": first.trace.n_calls,
                "failed_candidates": first.trace.failed_candidates,
                "ttft_s": _rounded(generation.first_token_s),
                "e2e_s": _rounded(seconds),
                **{f"{stage}_s": _rounded(value) for stage, value in _stages(generation).items()},
            },
        )


class ClientGone(Exception):
    """The client closed the connection; nobody is there to answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _stages(generation: Generation) -> Mapping[str, float]:
    """Seconds by stage, of the first choice."""
    first = generation.choices[0]
    times = first.times
    return {
        "queue": first.trace.queue_s + times.queue_s,
        "pair": first.trace.pair_s,
        "prefill": times.prefill_s,
        "transfer": times.transfer_s,
        "decode": times.decode_s,
    }


def _server_timing(generation: Generation) -> str:
    return ", ".join(f"{name};dur={1000 * s:.1f}" for name, s in _stages(generation).items())


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
