"""Sets of metrics that belong together, the same wherever they occur; `metrics.py` puts them into roles."""

from __future__ import annotations

import time
from collections.abc import Mapping

from k3.telemetry.declare import Declare
from k3.v1 import instance_pb2

LATENCY_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)


class CommonMetrics:
    """What every process says of itself."""

    def __init__(self, d: Declare) -> None:
        self.build_info = d.gauge("k3_build_info", "Always 1; the program's version.", version=())
        self.config_info = d.gauge(
            "k3_config_info",
            "Always 1; names of the resolved configuration and of the cache layout.",
            config_hash=(),
            layout_fingerprint=(),
        )
        self.ready = d.gauge("k3_ready", "1 while new requests are taken.")
        self.draining = d.gauge("k3_draining", "1 while draining.")
        self.start_time = d.gauge(
            "k3_process_start_time_seconds", "Start of the process, Unix time."
        )
        self.start_time.set(time.time())

    def identify(self, version: str, config_hash: str, layout_fingerprint: str) -> None:
        """Set the info gauges; an earlier identity goes away."""
        self.build_info.clear()
        self.build_info.labels(version).set(1)
        self.config_info.clear()
        self.config_info.labels(config_hash, layout_fingerprint).set(1)


class LoadMetrics:
    """Pools of an engine, as in the load snapshot it publishes."""

    def __init__(self, d: Declare) -> None:
        self.pages = d.gauge(
            "k3_kv_pages",
            "Pages by state; pinned pages are among the used ones.",
            state=("free", "used", "cached", "pinned", "quarantined"),
        )
        self.state_slots = d.gauge(
            "k3_state_slots",
            "State slots by state; pinned ones are read or filled by plans in flight.",
            state=("vacant", "live", "pinned", "checkpoint", "quarantined"),
        )

        self.usage = d.gauge(
            "k3_kv_pages_used_ratio", "Pages held or quarantined by all pages, 0 to 1."
        )

    def show(self, load: instance_pb2.Load) -> None:
        """Set every gauge from a snapshot."""
        not_free = load.pages_used + load.pages_quarantined
        self.usage.set(not_free / load.pages_total if load.pages_total else 0.0)
        pages = {
            "free": load.pages_free,
            "used": load.pages_used,
            "cached": load.pages_cached,
            "pinned": load.pages_pinned,
            "quarantined": load.pages_quarantined,
        }
        for state, n in pages.items():
            self.pages.labels(state).set(n)
        slots = {
            "live": load.state_slots_used,
            "pinned": load.state_slots_pinned,
            "checkpoint": load.state_slots_checkpoint,
            "quarantined": load.state_slots_quarantined,
        }
        slots["vacant"] = load.state_slots_total - sum(slots.values())
        for state, n in slots.items():
            self.state_slots.labels(state).set(n)


class TransferMetrics:
    """Transfers, seen from either side."""

    def __init__(self, d: Declare) -> None:
        self.seconds = d.histogram(
            "k3_transfer_seconds",
            "From the first token until the last byte is known in place.",
            LATENCY_S,
        )
        self.bytes = d.counter(
            "k3_transfer_bytes_total", "Bytes moved.", kind=("kv", "kda", "draft")
        )
        self.failures = d.counter(
            "k3_transfer_failures_total",
            "Transfers that did not complete.",
            reason=("aborted", "handle", "stalled", "lease", "peer_lost", "fenced", "deadline"),
        )
        self.in_flight = d.gauge("k3_transfer_in_flight", "Transfers running.")
        self.fenced_writes = d.counter(
            "k3_transfer_fenced_writes_total",
            "Records or messages of an older generation, dropped.",
        )
        self.connects = d.counter(
            "k3_transfer_connects_total",
            "Connect calls of pairs.",
            result=("ok", "refused", "failed"),
        )
        self.self_test = d.gauge(
            "k3_transfer_self_test_bytes_per_second",
            "What the slowest rank wrote in the start-up self-test; 0 = not tested, or failed.",
        )
        self.leases_active = d.gauge("k3_transfer_leases_active", "Destinations under a lease.")
        self.leases_expired = d.counter(
            "k3_transfer_leases_expired_total", "Leases that ran out without a heartbeat."
        )


BOOTSTRAPS = ("transferred", "local", "cold")


class SpecMetrics:
    """Speculation at decode; acceptance length = 1 + accepted / drafts."""

    def __init__(self, d: Declare) -> None:
        self.drafts = d.counter("k3_spec_drafts_total", "Verify groups that checked drafts.")
        self.draft_tokens = d.counter("k3_spec_draft_tokens_total", "Drafts checked.")
        self.accepted = d.counter("k3_spec_accepted_tokens_total", "Drafts accepted.")
        self.accepted_at = d.counter(
            "k3_spec_accepted_tokens_per_pos_total",
            "Drafts accepted, by their position in the group from 0.",
            position=(),
        )
        self.bootstrap = d.counter(
            "k3_draft_bootstrap_total",
            "Requests by how their drafter started: on rows from prefill, on rows computed here, or on none.",
            kind=BOOTSTRAPS,
        )
        self.length = d.histogram(
            "k3_spec_accept_length",
            "Tokens of a verify group that checked drafts, by how its request's drafter started.",
            range(1, 17),
            bootstrap=BOOTSTRAPS,
        )
        self.gate_open = d.gauge(
            "k3_spec_gate_open", "1 while steps propose drafts, 0 while the gate is closed."
        )
        self.gate_changes = d.counter(
            "k3_spec_gate_changes_total", "Times the gate opened or closed.", to=("open", "closed")
        )
        self.gate_open.set(1)
        self._is_open = True

    def gate(self, is_open: bool) -> None:
        """Where the gate is."""
        if is_open is not self._is_open:
            self.gate_changes.labels("open" if is_open else "closed").inc()
            self.gate_open.set(int(is_open))
            self._is_open = is_open

    def observe(self, bootstrap: str, n_drafts: int, n_accepted: int) -> None:
        """One row of one step."""
        if n_drafts:
            self.length.labels(bootstrap).observe(1 + n_accepted)
            self.drafts.inc()
            self.draft_tokens.inc(n_drafts)
            self.accepted.inc(n_accepted)
            for position in range(n_accepted):
                self.accepted_at.labels(str(position)).inc()


class LocalPrefillMetrics:
    """Prompts that a decode instance computed itself."""

    def __init__(self, d: Declare) -> None:
        self.prompts = d.counter("k3_local_prefill_prompts_total", "Prompts computed in place.")
        self.tokens = d.counter("k3_local_prefill_tokens_total", "Prompt tokens computed in place.")
        self.step_s = d.histogram(
            "k3_local_prefill_step_seconds",
            "One step of prompts in place: receipt of the plan to its end.",
            LATENCY_S,
        )


class PrefixMetrics:
    """The prefix cache. wanted - hit is reuse lost to missing checkpoints, chain - wanted is lost for good."""

    def __init__(self, d: Declare) -> None:
        tokens, checkpoints = "Prompt tokens of started requests", "Checkpoints"
        counters = {
            "query_tokens": ("k3_prefix_query_tokens_total", f"{tokens}."),
            "chain_tokens": ("k3_prefix_chain_tokens_total", f"{tokens} whose pages were cached."),
            "wanted_tokens": (
                "k3_prefix_wanted_tokens_total",
                f"{tokens} usable if every page had a checkpoint.",
            ),
            "hit_tokens": ("k3_prefix_hit_tokens_total", f"{tokens} not computed again."),
            "kept": ("k3_state_ckpt_kept_total", f"{checkpoints} filed."),
            "dropped": (
                "k3_state_ckpt_dropped_total",
                f"{checkpoints} not filed for want of a slot or a page.",
            ),
            "evicted": ("k3_state_ckpt_evicted_total", f"{checkpoints} spent for something newer."),
            "orphaned": (
                "k3_state_ckpt_orphaned_total",
                f"{checkpoints} dropped with the page before them.",
            ),
            "demands_recorded": (
                "k3_ckpt_demand_recorded_total",
                "Requests that found pages but no checkpoint.",
            ),
            "demands_cut": (
                "k3_ckpt_demand_cut_total",
                "Chunks that ended where an earlier request had missed a checkpoint.",
            ),
            "filing_errors": ("k3_filing_errors_total", "Plans whose filing failed."),
        }
        self._counters = {name: d.counter(*spec) for name, spec in counters.items()}

    def grew(self, by: Mapping[str, int]) -> None:
        """Count more, by name."""
        for name, n in by.items():
            self._counters[name].inc(n)
