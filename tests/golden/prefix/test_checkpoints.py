"""State slots against published histories: after every event holds, pins, checkpoints, their order and the counters."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from prefill_svc.core.checkpoints import NO_SLOT, FilingError, Mode, StateRow, StateSlots, Tenant
from prefill_svc.core.ladder import Ladder, RungPolicy
from prefill_svc.core.prefix_cache import gate

pytestmark = pytest.mark.prefill

FOLDER = Path(__file__).parent


def cases(table: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{table}.json").read_text())["cases"]


class Front:
    """Requests with chunk ends given from outside, over state slots; pages are an endless pool."""

    def __init__(self, config: dict[str, Any], mode: Mode) -> None:
        self.slots = StateSlots(config["slots"], mode, has_holds=config["pp"] > 1)
        self.ladder = Ladder(
            config["hash_block"],
            config["interval"],
            config["anchor"],
            config["successor_room"],
        )
        self.published: dict[str, int] = {}  # tokens by content
        self.requests: dict[str, Request] = {}
        self.batches: dict[str, list[tuple[Request, StateRow]]] = {}
        self.order: deque[str] = deque()

    def admit(self, rid: str, content: str, prompt_len: int) -> dict[str, Any]:
        hb = self.ladder.page_tokens
        found = gate(
            prompt_len,
            self.published.get(content, 0) // hb,
            lambda n: key(content, n * hb) in self.slots,
            self.ladder,
        )
        hit = found.hit * hb
        tenant = self.slots.admit(key(content, hit) if hit else None)
        assert tenant is not None
        self.requests[rid] = Request(content, prompt_len, tenant, hit, found.demand)
        return {
            "admitted": True,
            "hit_tokens": hit,
            "adopted": hit > 0 and tenant.source == NO_SLOT,
            "demand_pos": found.demand,
        }

    def schedule(self, batch: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.order.append(batch)
        self.batches[batch] = []
        out = []
        for given in rows:
            request, end = self.requests[given["rid"]], given["end"]
            is_kept = self.ladder.reason(end, request.prompt_len, request.demand)
            start, request.progress = request.progress, end
            row = self.slots.row(
                request.tenant, start, end, key(request.content, end) if is_kept else None
            )
            self.batches[batch].append((request, row))
            out.append(
                {
                    "rid": given["rid"],
                    "start": start,
                    "end": end,
                    "read_slot": row.read_slot,
                    "write_slot": row.write_slot,
                }
            )
        return out

    def complete(self, batch: str, filing_raises_at_row: int | None = None) -> None:
        assert self.order.popleft() == batch
        planned = self.batches.pop(batch)
        rows = [row for _, row in planned]
        self.slots.lift_holds(rows)
        for request, row in planned:
            if request.tenant.is_open:
                done = max(self.published.get(request.content, 0), row.end)
                self.published[request.content] = done
        for i, row in enumerate(rows):
            if i == filing_raises_at_row:
                break
            self.slots.file(row)
        self.slots.unpin(rows)

    def leave(self, rid: str) -> None:
        self.slots.release(self.requests.pop(rid).tenant)

    def evict(self, content: str, end: int) -> None:
        self.published[content] = min(self.published.get(content, 0), end - self.ladder.page_tokens)
        self.slots.drop(key(content, end))

    def state(self) -> dict[str, Any]:
        open_ = sorted(self.requests.items())
        counters = self.slots.counters
        return {
            "holds": {rid: r.tenant.hold_end for rid, r in open_ if r.tenant.hold_end},
            "schedulable": [
                rid for rid, r in open_ if not r.tenant.hold_end and r.progress < r.prompt_len
            ],
            "progress": {rid: r.progress for rid, r in open_},
            "live_slot": {rid: r.tenant.live for rid, r in open_},
            "fork_src": {rid: r.tenant.source for rid, r in open_},
            "index": sorted([k.decode(), slot] for k, slot in self.slots.checkpoints().items()),
            "pinned": {str(slot): n for slot, n in sorted(self.slots.pins().items())},
            "vacant": self.slots.vacant(),
            "ckpt_lru": self.slots.by_last_use(),
            "counters": {
                "kept": counters.kept,
                "dropped": counters.dropped,
                "evicted": counters.evicted,
                "orphaned": counters.orphaned,
            },
        }


class Request:
    def __init__(
        self, content: str, prompt_len: int, tenant: Tenant, progress: int, demand: int
    ) -> None:
        self.content, self.prompt_len = content, prompt_len
        self.tenant, self.progress, self.demand = tenant, progress, demand


def key(content: str, tokens: int) -> bytes:
    return f"{content}@{tokens}".encode()


def replay(case: dict[str, Any], mode: Mode) -> None:
    front = Front(case["config"], mode)
    for number, step in enumerate(case["trace"]):
        event = dict(step["event"])
        match event.pop("op"):
            case "admit":
                result = front.admit(**event)
            case "schedule":
                result = front.schedule(**event)
            case "complete":
                result = front.complete(**event)
            case "retire" | "abort" | "preempt":
                result = front.leave(**event)
            case "evict_kv_block":
                result = front.evict(**event)
            case other:
                raise AssertionError(f"unknown event {other!r}")
        at = f"event {number}: {step['event']}"
        assert result == step["result"], at
        expected = step["state"] | {"index": sorted(step["state"]["index"])}
        assert front.state() == expected, at


HOLDS, FORKS = cases("hold_traces"), cases("fork_at_schedule_traces")


@pytest.mark.parametrize("case", HOLDS, ids=[case["id"] for case in HOLDS])
def test_states_filed_at_the_acknowledgement_under_a_hold(case: dict[str, Any]) -> None:
    replay(case, Mode.FORK_HOLD)


@pytest.mark.parametrize("case", FORKS, ids=[case["id"] for case in FORKS])
def test_states_forked_when_their_chunk_is_planned(case: dict[str, Any]) -> None:
    replay(case, Mode.FORK_AT_SCHEDULE)


GATES = cases("hit_gate")


@pytest.mark.parametrize("case", GATES, ids=[case["id"] for case in GATES])
def test_a_hit_needs_pages_and_a_state(case: dict[str, Any]) -> None:
    given, expected = case["in"], case["out"]
    ladder = Ladder(given["hash_block"], given["interval"], successor_room=given["successor_room"])
    ready = set(given["ready_ckpt_blocks"])
    found = gate(given["prompt_len"], given["chain_match_blocks"], ready.__contains__, ladder)
    assert (found.chain, found.hit, found.wanted, found.demand) == (
        expected["chain_hit_blocks"],
        expected["hit_blocks"],
        expected["wanted_blocks"],
        expected["demand_pos"],
    )


LADDERS = cases("checkpoint_schedule")


@pytest.mark.parametrize("case", LADDERS, ids=[case["id"] for case in LADDERS])
def test_chunks_end_on_targets_and_only_those_are_kept(case: dict[str, Any]) -> None:
    given = case["in"]
    ladder = Ladder(
        given["hash_block"],
        given["interval"],
        given["anchor"],
        given["successor_room"],
        RungPolicy(given["rung_policy"]),
    )
    n, demand, start = given["prompt_len"], given["demand_pos"], given["start"]
    got = []
    while start < n:
        length = min(n - start, given["chunk_budget"])
        if start + length < n:
            length = length - length % given["chunk_align"] or length
        end = ladder.cut(start, start + length, n, demand)
        why = ladder.reason(end, n, demand)
        got.append((start, end, end == n, why is not None, why.value if why else None))
        start = end
    assert got == [(c["start"], c["end"], c["final"], c["file"], c["why"]) for c in case["chunks"]]


def test_a_row_whose_slot_was_left_is_not_filed() -> None:
    slots = StateSlots(3, Mode.FORK_HOLD, has_holds=False)
    tenant = slots.admit(None)
    assert tenant is not None
    row = slots.row(tenant, 0, 16, b"a")
    slots.file(row)
    with pytest.raises(FilingError, match="left before its state was filed"):
        slots.file(row)
