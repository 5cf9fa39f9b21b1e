"""A router whose only engines are decode instances that compute their own prompts."""

from __future__ import annotations

import httpx
import pytest

from router.text.folder import ModelFolder
from tests.unit.router.conftest import running_router
from tests.unit.router.fake_engine import FakeEngine

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


async def test_short_prompts_alone_do_not_make_it_ready(folder: ModelFolder) -> None:
    """A prompt beyond the bound would find nobody."""
    engine = FakeEngine(local_prefill_max=64)
    async with running_router(folder, decodes=[engine], prefills=[], wait_ready=False) as router:
        answer = await router.client.get("/ready")
        assert answer.status_code == 503
        assert "no_prefill_available" in answer.text
