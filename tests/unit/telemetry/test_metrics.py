"""Names are API: documented, well formed, present at zero before traffic."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import generate_latest

from k3.telemetry import metrics
from k3.telemetry.declare import encode
from k3.v1 import instance_pb2

DOCS = Path(__file__).parents[3] / "docs"
ROLES = [metrics.RouterMetrics, metrics.PrefillMetrics, metrics.DecodeMetrics]


def test_docs_metrics_is_current():
    assert (DOCS / "metrics.md").read_text() == metrics.document()


@pytest.mark.parametrize("role", ROLES)
def test_names_follow_the_rules(role):
    for row in role().declare.rows:
        assert row.name.startswith("k3_")
        assert row.name.endswith("_total") == (row.kind == "counter")
        assert row.help.endswith(".")
        assert not row.name.endswith(("_ms", "_millis", "_mb"))


@pytest.mark.parametrize("role", ROLES)
def test_two_processes_in_one_program_do_not_share_counters(role):
    one, two = role(), role()
    one.common.ready.set(1)
    assert b"k3_ready 1.0" in generate_latest(one.registry)
    assert b"k3_ready 0.0" in generate_latest(two.registry)


def test_known_label_sets_exist_at_zero_before_traffic():
    text = generate_latest(metrics.DecodeMetrics().registry).decode()
    for series in (
        'k3_kv_pages{state="quarantined"} 0.0',
        'k3_transfer_bytes_total{kind="kda"} 0.0',
        'k3_transfer_candidates_failed_total{reason="layout_mismatch"} 0.0',
    ):
        assert series in text


def test_gauges_show_a_load_snapshot():
    decode = metrics.DecodeMetrics()
    decode.show(
        instance_pb2.Load(
            running=2,
            waiting=3,
            pages_free=5,
            pages_used=7,
            state_slots_used=2,
            state_slots_quarantined=1,
            state_slots_total=9,
            rows_used=2,
            draft_slots_used=2,
            draft_slots_total=9,
            transfers=1,
        )
    )
    text = generate_latest(decode.registry).decode()
    for series in (
        "k3_decode_running 2.0",
        "k3_decode_waiting 3.0",
        "k3_decode_rows_used 2.0",
        'k3_kv_pages{state="used"} 7.0',
        'k3_state_slots{state="vacant"} 6.0',
        'k3_draft_slots{state="vacant"} 6.0',
        'k3_draft_slots{state="live"} 2.0',
        'k3_draft_slots{state="quarantined"} 1.0',
        "k3_transfer_in_flight 1.0",
    ):
        assert series in text


@pytest.mark.parametrize(
    "accept", ["", "text/plain", "application/openmetrics-text; version=1.0.0"]
)
def test_aliases_show_the_same_values_under_other_names(accept):
    router = metrics.RouterMetrics()
    router.show_aliases("k3-mini")
    router.ttft_s.observe(0.3)
    router.finish.labels("length").inc(3)
    router.stage_s.labels("prefill").observe(2)
    body, _ = encode(router.registry, accept)
    labels = 'engine="0",model_name="k3-mini"'
    for series in (
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="k3-mini"} 3.0',
        f"vllm:request_prefill_time_seconds_sum{{{labels}}} 2.0",
        f"vllm:request_decode_time_seconds_count{{{labels}}} 0.0",
        "k3_router_time_to_first_token_seconds_count 1.0",
    ):
        assert series in body.decode()
    assert b"_created" not in body


@pytest.mark.parametrize("role", ROLES)
def test_every_role_can_show_its_aliases(role):
    shown = role()
    shown.show_aliases("m")
    text = encode(shown.registry, "")[0].decode()
    for alias in shown.aliases():
        assert f"\n{alias.name}" in text


def test_the_encoding_follows_the_accept_header():
    registry = metrics.RouterMetrics().registry
    plain, kind = encode(registry, "text/html, */*;q=0.1")
    assert kind.startswith("text/plain; version=0.0.4")
    assert not plain.endswith(b"# EOF\n")
    body, kind = encode(registry, "text/plain;q=0.5, application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_a_new_identity_replaces_the_old_one():
    common = metrics.PrefillMetrics()
    common.common.identify("1", "aa", "bb")
    common.common.identify("1", "aa", "cc")
    text = generate_latest(common.registry).decode()
    assert 'layout_fingerprint="cc"' in text
    assert 'layout_fingerprint="bb"' not in text


@pytest.mark.parametrize("role", [metrics.PrefillMetrics, metrics.DecodeMetrics])
def test_both_sides_show_their_destinations_under_a_lease(role):
    made = role()
    made.show(instance_pb2.Load(transfers=3))
    assert made.registry.get_sample_value("k3_transfer_leases_active") == 3
