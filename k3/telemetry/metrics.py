"""Every metric of every process, declared once; one class per role, each on its own registry.

Names and labels are API: `docs/metrics.md` is generated from here (`python -m k3.telemetry.metrics`). Label sets whose
values are known are created at once, so that a series exists at 0 before traffic. Seconds and bytes only; counters end
in `_total`. Gauges of load are set from the instance's own counters when somebody scrapes (`LoadMetrics.show`), so
engines only observe what happens.
"""

from __future__ import annotations

import sys

from prometheus_client import CollectorRegistry

from k3.telemetry.compat import Alias, Aliases
from k3.telemetry.declare import Declare
from k3.telemetry.metric_sets import (
    LATENCY_S,
    CommonMetrics,
    LoadMetrics,
    LocalPrefillMetrics,
    PrefixMetrics,
    SpecMetrics,
    TransferMetrics,
)
from k3.v1 import instance_pb2

STEP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    2.5,
)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)


class EngineMetrics:
    """What prefill and decode share."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.declare = Declare(self.registry)
        self.common = CommonMetrics(self.declare)
        self.load = LoadMetrics(self.declare)
        self.transfer = TransferMetrics(self.declare)

    def show(self, load: instance_pb2.Load) -> None:
        """Set every gauge from a load snapshot."""
        self.load.show(load)
        self.transfer.in_flight.set(load.transfers)
        self.transfer.leases_active.set(load.transfers)  # every transfer that runs has a lease

    def aliases(self) -> list[Alias]:
        """vLLM's names for what this role measures."""
        return [Alias("vllm:kv_cache_usage_perc", self.load.usage)]

    def show_aliases(self, model_name: str) -> None:
        """Also serve the aliases, labelled with the model."""
        self.registry.register(Aliases(self.aliases(), model_name))


class PrefillMetrics(EngineMetrics):
    """Metrics of `k3-prefill`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        d = self.declare
        self.running = d.gauge("k3_prefill_running", "Requests being computed or transferred.")
        self.waiting = d.gauge("k3_prefill_waiting", "Requests waiting for their first chunk.")
        self.tokens = d.counter("k3_prefill_tokens_total", "Prompt tokens computed.")
        self.chunk_s = d.histogram(
            "k3_prefill_chunk_seconds", "One step: receipt of the plan to its end.", STEP_S
        )
        self.inflight = d.gauge(
            "k3_pp_inflight", "Plans not acknowledged, at most as many as there are stages."
        )
        self.bubble_s = d.counter(
            "k3_pp_bubble_seconds_total", "Seconds the last stage waited for the one before."
        )
        self.queue_s = d.histogram(
            "k3_prefill_queue_wait_seconds", "From arrival to the first chunk.", LATENCY_S
        )
        self.held = d.gauge(
            "k3_prefill_held_requests", "Requests that wait for their state to be filed."
        )
        self.held_s = d.counter(
            "k3_prefill_hold_seconds_total",
            "Seconds requests waited for their state to be filed, of all of them together.",
        )
        self.prefix = PrefixMetrics(d)

    def aliases(self) -> list[Alias]:
        """vLLM's names for what this role measures."""
        return [
            *super().aliases(),
            Alias("vllm:num_requests_running", self.running),
            Alias("vllm:num_requests_waiting", self.waiting),
            Alias("vllm:prompt_tokens", self.tokens),
        ]

    def show(self, load: instance_pb2.Load) -> None:
        """Set every gauge from a load snapshot."""
        super().show(load)
        self.running.set(load.running)
        self.waiting.set(load.waiting)


class DecodeMetrics(EngineMetrics):
    """Metrics of `k3-decode`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        d = self.declare
        self.running = d.gauge("k3_decode_running", "Requests admitted.")
        self.waiting = d.gauge("k3_decode_waiting", "Requests waiting for admission.")
        self.queue_s = d.histogram(
            "k3_decode_queue_wait_seconds", "From arrival to admission, told at the end.", LATENCY_S
        )
        self.rows_used = d.gauge("k3_decode_rows_used", "Rows of the device tables held.")
        self.step_s = d.histogram(
            "k3_decode_step_seconds", "One step: receipt of the plan to its end.", STEP_S
        )
        self.forward_s = d.histogram(
            "k3_decode_forward_seconds", "The model's forward inside a step.", STEP_S
        )
        self.batch_size = d.histogram("k3_decode_batch_size", "Rows of a step.", BATCH)
        self.tokens = d.counter(
            "k3_decode_tokens_total", "Tokens emitted, the first ones excluded."
        )
        self.spec = SpecMetrics(d)
        self.local = LocalPrefillMetrics(d)
        self.prefix = PrefixMetrics(d)
        self.draft_slots = d.gauge(
            "k3_draft_slots",
            "Draft rings by state; every state slot has one where drafts are made.",
            state=("vacant", "live", "quarantined"),
        )
        self.rank_tokens = d.gauge(
            "k3_helix_rank_tokens",
            "Tokens of running requests in the latent cache of one context-parallel rank.",
            cp=(),
        )
        self.exchanged_bytes = d.counter(
            "k3_helix_exchange_bytes_total",
            "Bytes one rank sent to others to merge attention over context-parallel ranks.",
        )
        self.preemptions = d.counter(
            "k3_preemptions_total", "Requests taken off their rows by the scheduler."
        )
        self.candidates_failed = d.counter(
            "k3_transfer_candidates_failed_total",
            "Prefill candidates given up, by reason.",
            reason=(
                *("unavailable", "resource_exhausted", "layout_mismatch", "reconnect_required"),
                *(
                    "transfer_stalled",
                    "transfer_failed",
                    "instance_failed",
                    "deadline",
                    "not_allowed",
                ),
            ),
        )

    def aliases(self) -> list[Alias]:
        """vLLM's names for what this role measures."""
        return [
            *super().aliases(),
            Alias("vllm:num_requests_running", self.running),
            Alias("vllm:num_requests_waiting", self.waiting),
            Alias("vllm:num_preemptions", self.preemptions),
            Alias("vllm:generation_tokens", self.tokens),
        ]

    def show(self, load: instance_pb2.Load) -> None:
        """Set every gauge from a load snapshot."""
        super().show(load)
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.rows_used.set(load.rows_used)
        quarantined = load.state_slots_quarantined if load.draft_slots_total else 0
        self.draft_slots.labels("live").set(load.draft_slots_used)
        self.draft_slots.labels("quarantined").set(quarantined)
        vacant = load.draft_slots_total - load.draft_slots_used - quarantined
        self.draft_slots.labels("vacant").set(vacant)
        for cp, n_tokens in enumerate(load.rank_tokens):
            self.rank_tokens.labels(cp).set(n_tokens)


class RouterMetrics:
    """Metrics of `k3-router`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.declare = d = Declare(self.registry)
        self.common = CommonMetrics(d)
        self.http_requests = d.counter(
            "k3_http_requests_total", "HTTP requests answered.", path=(), method=(), code=()
        )
        self.http_s = d.histogram(
            "k3_http_request_duration_seconds",
            "HTTP request to the end of its answer.",
            LATENCY_S,
            path=(),
        )
        self._requests(d)
        self._fleet(d)

    def _requests(self, d: Declare) -> None:
        self.in_flight = d.gauge("k3_router_requests_in_flight", "Generations being served.")
        self.queue_depth = d.gauge("k3_router_queue_depth", "Requests waiting for an instance.")
        self.queue_s = d.histogram(
            "k3_router_queue_seconds", "Time in the router's queue.", LATENCY_S
        )
        self.rejected = d.counter(
            "k3_router_rejected_total",
            "Requests turned away by admission.",
            reason=("queue_full", "queue_timeout", "capacity_exceeded", "draining", "no_instance"),
        )
        self.ttft_s = d.histogram(
            "k3_router_time_to_first_token_seconds", "Arrival to the first token.", LATENCY_S
        )
        self.itl_s = d.histogram(
            "k3_router_inter_token_latency_seconds", "Between tokens of one generation.", STEP_S
        )
        self.e2e_s = d.histogram(
            "k3_router_e2e_request_latency_seconds", "Arrival to the last token.", LATENCY_S
        )
        self.stage_s = d.histogram(
            "k3_router_stage_seconds",
            "Where the time of a generation went.",
            LATENCY_S,
            stage=("queue", "pair", "prefill", "transfer", "decode"),
        )
        self.prompt_tokens = d.counter("k3_router_prompt_tokens_total", "Prompt tokens served.")
        self.generation_tokens = d.counter("k3_router_generation_tokens_total", "Tokens generated.")
        self.cached_tokens = d.counter(
            "k3_router_cached_tokens_total", "Prompt tokens whose prefill was skipped."
        )
        self.finish = d.counter(
            "k3_router_finish_total",
            "Generations by end.",
            reason=("stop", "length", "error", "cancelled"),
        )
        self.errors = d.counter("k3_router_errors_total", "Error answers by code.", code=())
        self.unknown_params = d.counter(
            "k3_router_unknown_params_total", "Body fields nobody knows, by name.", field=()
        )
        self.cancelled = d.counter(
            "k3_router_requests_cancelled_total",
            "Requests whose client went away.",
            stage=("queue", "prefill", "decode"),
        )

    def _fleet(self, d: Declare) -> None:
        self.retries = d.counter(
            "k3_router_retries_total", "Attempts after the first.", stage=(), reason=()
        )
        self.pair_selections = d.counter(
            "k3_router_pair_selections_total", "Pairs chosen.", policy=()
        )
        self.instance_up = d.gauge(
            "k3_router_instance_up", "Usable instances.", instance_role=("prefill", "decode")
        )
        self.instance_in_flight = d.gauge(
            "k3_router_instance_in_flight", "Generations at an instance.", instance_id=()
        )
        self.circuit_state = d.gauge(
            "k3_router_circuit_state", "0 closed, 1 half open, 2 open.", instance_id=()
        )
        self.cache_pages = d.gauge(
            "k3_router_cache_pages", "Cached pages known of a prefill instance.", instance_id=()
        )
        self.cache_stale = d.gauge(
            "k3_router_cache_events_stale",
            "1 while pairing guesses what an instance has cached: its events stopped coming.",
            instance_id=(),
        )

    def aliases(self) -> list[Alias]:
        """vLLM's names for what the router measures."""
        return [
            Alias("vllm:num_requests_running", self.in_flight),
            Alias("vllm:num_requests_waiting", self.queue_depth),
            Alias("vllm:prompt_tokens", self.prompt_tokens),
            Alias("vllm:generation_tokens", self.generation_tokens),
            Alias("vllm:prefix_cache_queries", self.prompt_tokens),
            Alias("vllm:prefix_cache_hits", self.cached_tokens),
            Alias("vllm:request_success", self.finish, rename={"reason": "finished_reason"}),
            Alias("vllm:time_to_first_token_seconds", self.ttft_s),
            Alias("vllm:inter_token_latency_seconds", self.itl_s),
            Alias("vllm:e2e_request_latency_seconds", self.e2e_s),
            Alias("vllm:request_queue_time_seconds", self.queue_s),
            Alias("vllm:request_prefill_time_seconds", self.stage_s, only={"stage": "prefill"}),
            Alias("vllm:request_decode_time_seconds", self.stage_s, only={"stage": "decode"}),
        ]

    def show_aliases(self, model_name: str) -> None:
        """Also serve the aliases, labelled with the model."""
        self.registry.register(Aliases(self.aliases(), model_name))


def document() -> str:
    """All metrics as Markdown: `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Prometheus text on `/metrics` (OpenMetrics by `Accept`). Names and labels are API.",
        "Generated: `python -m k3.telemetry.metrics > docs/metrics.md`. With `telemetry.metrics_compat=vllm`",
        "(the default) the aliases below each table are served too, with labels `model_name` and `engine`.",
    ]
    for title, metrics in (
        ("k3-router", RouterMetrics()),
        ("k3-prefill", PrefillMetrics()),
        ("k3-decode", DecodeMetrics()),
    ):
        lines += ["", f"## {title}", "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
        for row in metrics.declare.rows:
            labels = ", ".join(row.labels)
            lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.help} |")
        names = ", ".join(f"`{alias.name}`" for alias in metrics.aliases())
        lines += ["", f"Aliases: {names}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
