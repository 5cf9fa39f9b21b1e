"""What a decode instance that computes prompts tells of its prefix cache is what it has, as the router reads it."""

from __future__ import annotations

import pytest

from decode_svc.caller import Finished
from k3.cache import hash_chain
from k3.rpc.cache_feed import CacheTail
from k3.v1 import instance_pb2
from router.fleet.cache_events import CacheFollower
from router.fleet.prefix import CacheView
from tests.sim.decode_world import PAGE_TOKENS, World
from tests.sim.intake_story import play

pytestmark = pytest.mark.prefill


def test_a_watcher_knows_what_a_prompt_would_find_and_that_it_was_flushed() -> None:
    async def story(world: World) -> None:
        life, view = world.life, CacheView()
        tail, follower = CacheTail(lambda: life.cache_log), CacheFollower()

        def follow() -> None:
            load = instance_pb2.WatchResponse(instance_id=life.instance_id, load=life.load())
            for message in tail.messages(load):
                follower.apply(message, view)

        follow()
        assert view.is_there
        assert view.n_pages == 0
        ends = []
        for _ in range(2):
            ends.append((await world.drain(world.generate(n=11, m=2)))[-1])
            follow()
        deployment = world.deployment
        namespace = hash_chain.namespace(
            deployment.layout_fingerprint, deployment.draft_fingerprint
        )
        root = hash_chain.root(namespace, PAGE_TOKENS, salt=b"")
        usable = view.usable_pages(hash_chain.page_hashes(root, (1,) * 11, PAGE_TOKENS))
        assert usable == 2
        assert all(isinstance(end, Finished) for end in ends)
        assert [end.usage.cached_tokens for end in ends] == [0, usable * PAGE_TOKENS]
        assert life.flush_cache() == (2, 1)
        follow()
        assert view.n_pages == 0
        await world.settle()

    play(story, role="both", prefix="on")
