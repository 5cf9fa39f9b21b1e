"""A router whose only engines are decode instances that compute their own prompts."""

from __future__ import annotations

import httpx
import pytest

from router.fleet.prefix import STALE_S, PromptPages
from router.text.folder import ModelFolder
from tests.unit.router.conftest import running_router, until
from tests.unit.router.fake_engine import FakeEngine
from tests.unit.router.test_cache_pairing import PAGE_TOKENS, PROMPT, Feed

pytestmark = pytest.mark.prefill


async def test_it_is_ready_and_sends_no_candidates(folder: ModelFolder) -> None:
    engine = FakeEngine(local_prefill_max=512)
    async with running_router(folder, decodes=[engine], prefills=[]) as router:
        answer = await router.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert (await router.client.get("/v1/models")).json()["data"]
        async with httpx.AsyncClient(base_url=router.admin_url) as admin:
            flushed = (await admin.post("/admin/cache/flush")).json()
        assert [entry["id"] for entry in flushed] == ["decode-a"]
    assert [list(request.candidates) for request in engine.requests] == [[]]


async def test_what_was_sent_there_counts_when_the_events_of_its_cache_stop(
    folder: ModelFolder,
) -> None:
    engine = FakeEngine(local_prefill_max=512, cache=Feed("decode-a"))
    async with running_router(folder, decodes=[engine], prefills=[]) as router:
        instance = router.router.serving.registry.find("decode-a")
        await until(lambda: instance.cache.is_there, "a snapshot of its cache")
        body = {"prompt": PROMPT, "max_tokens": 4}
        answer = await router.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert instance.snapshot is not None
        pages, at = PromptPages(PROMPT, b""), instance.snapshot.at
        assert instance.usable_tokens(pages, at) == 0, "its events say that nothing is there"
        assert instance.usable_tokens(pages, at + STALE_S + 0.1) == 6 * PAGE_TOKENS
        text = (await router.client.get("/metrics")).text
        assert 'k3_router_cache_pages{instance_id="decode-a"} 0.0' in text


async def test_short_prompts_alone_do_not_make_it_ready(folder: ModelFolder) -> None:
    """A prompt beyond the bound would find nobody."""
    engine = FakeEngine(local_prefill_max=64)
    async with running_router(folder, decodes=[engine], prefills=[], wait_ready=False) as router:
        answer = await router.client.get("/ready")
        assert answer.status_code == 503
        assert "no_prefill_available" in answer.text
