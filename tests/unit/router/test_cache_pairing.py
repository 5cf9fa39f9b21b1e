"""A prompt goes to the prefill instance that has most of it cached, over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from k3.cache import hash_chain
from k3.v1 import instance_pb2
from router.fleet.instance import Instance, Role
from router.fleet.prefix import STALE_S, PromptPages
from router.text.folder import ModelFolder
from tests.unit.router.conftest import RunningRouter, running_router, until
from tests.unit.router.fake_engine import FakeEngine

pytestmark = pytest.mark.prefill

PROMPT = list(range(100, 200))
PAGE_TOKENS = 16  # of the engines at the protocol


def chain(ids: list[int], salt: bytes = b"") -> tuple[bytes, ...]:
    root = hash_chain.root(hash_chain.namespace("layout", ""), PAGE_TOKENS, salt=salt)
    return hash_chain.page_hashes(root, ids, PAGE_TOKENS)


class NeverHashed(PromptPages):
    """A prompt that nobody may hash."""

    def chain(self, namespace: str, page_tokens: int) -> tuple[bytes, ...]:
        raise AssertionError(f"hashed for {namespace}")


@dataclass
class Feed:
    """Everything that happened, as `CacheFeed` passes it on."""

    instance_id: str
    seq: int = 0
    events: list[instance_pb2.CacheEvent] = field(default_factory=list)

    def since(self, seq: int) -> list[instance_pb2.CacheEvent]:
        return self.events[seq:]

    def snapshot(self) -> list[instance_pb2.CacheSnapshot]:
        pages = [page for event in self.events for page in event.stored.hashes]
        checkpoints = [page for event in self.events for page in event.stored.checkpoints]
        return [
            instance_pb2.CacheSnapshot(
                seq=self.seq, first=True, last=True, pages=pages, checkpoints=checkpoints
            )
        ]

    def store(self, pages: tuple[bytes, ...], n_skipped: int = 0) -> None:
        self.seq += 1 + n_skipped
        stored = instance_pb2.PagesStored(hashes=pages, checkpoints=pages[-1:])
        self.events += [instance_pb2.CacheEvent()] * n_skipped
        self.events.append(instance_pb2.CacheEvent(seq=self.seq, stored=stored))


@dataclass
class Fleet:
    router: RunningRouter
    prefills: list[FakeEngine]

    async def chosen(self, ids: list[int], **fields: object) -> list[str]:
        """Prefill candidates of a request, in order."""
        decode = self.router.decode
        decode.requests.clear()
        decode.script = [[5]]
        body = {"prompt": ids, "max_tokens": 2, **fields}
        answer = await self.router.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return [candidate.instance_id for candidate in decode.requests[0].candidates]

    def followed(self, n: int) -> Instance:
        return self.router.router.serving.registry.find(f"prefill-{n}")

    async def knows(self, n: int, n_pages: int) -> None:
        await until(lambda: self.followed(n).cache.n_pages == n_pages, "cache events")


@pytest.fixture
async def fleet(folder: ModelFolder) -> AsyncIterator[Fleet]:
    prefills = [
        FakeEngine(role="prefill", instance_id=f"prefill-{n}", cache=Feed(f"prefill-{n}"))
        for n in range(3)
    ]
    async with running_router(folder, prefills=prefills) as router:
        registry = router.router.serving.registry
        await until(lambda: len(registry.usable(Role.PREFILL)) == 3, "three prefills")
        yield Fleet(router, prefills)


async def test_the_instance_with_most_of_the_prompt_comes_first(fleet: Fleet) -> None:
    pages = chain(PROMPT)
    for n, n_pages in ((1, 2), (2, 5)):
        engine = fleet.prefills[n]
        assert isinstance(engine.cache, Feed)
        engine.cache.store(pages[:n_pages])
        engine.changed.set()
        await fleet.knows(n, n_pages)
    assert await fleet.chosen(PROMPT) == ["prefill-2", "prefill-1", "prefill-0"]
    assert (await fleet.chosen(PROMPT[1:]))[0] == "prefill-0"  # nothing of it is anywhere
    text = (await fleet.router.client.get("/metrics")).text
    assert 'k3_router_cache_pages{instance_id="prefill-2"} 5.0' in text
    assert 'k3_router_cache_events_stale{instance_id="prefill-2"} 0.0' in text


async def test_the_last_token_of_a_prompt_is_never_found(fleet: Fleet) -> None:
    engine = fleet.prefills[2]
    assert isinstance(engine.cache, Feed)
    engine.cache.store(chain(PROMPT))  # its one checkpoint stands behind 96 tokens
    engine.changed.set()
    await fleet.knows(2, 6)
    instance = fleet.followed(2)
    assert instance.snapshot is not None
    now = instance.snapshot.at
    for n_tokens, usable in ((95, 0), (96, 0), (97, 96)):
        assert instance.usable_tokens(PromptPages(PROMPT[:n_tokens], b""), now) == usable


async def test_another_caller_s_pages_are_of_no_use(fleet: Fleet) -> None:
    engine = fleet.prefills[2]
    assert isinstance(engine.cache, Feed)
    engine.cache.store(chain(PROMPT))
    engine.changed.set()
    await fleet.knows(2, 6)
    assert (await fleet.chosen(PROMPT, cache_salt="mine"))[0] == "prefill-0"


async def test_after_a_gap_the_cache_is_read_anew(fleet: Fleet) -> None:
    engine = fleet.prefills[2]
    assert isinstance(engine.cache, Feed)
    engine.cache.store(chain(PROMPT)[:3])
    engine.changed.set()
    await fleet.knows(2, 3)
    engine.cache.store(chain(PROMPT)[3:], n_skipped=1)
    engine.changed.set()
    await fleet.knows(2, 6)
    assert fleet.followed(2).is_usable
    assert (await fleet.chosen(PROMPT))[0] == "prefill-2"


async def test_when_events_stopped_what_was_sent_there_counts(fleet: Fleet) -> None:
    assert (await fleet.chosen(PROMPT))[0] == "prefill-0"
    instance = fleet.followed(0)
    assert instance.snapshot is not None
    later = instance.snapshot.at + STALE_S + 0.1
    pages = PromptPages(PROMPT, b"")
    assert not instance.is_cache_known(later)
    assert instance.usable_tokens(pages, later) == 6 * PAGE_TOKENS
    assert fleet.followed(1).usable_tokens(pages, later) == 0


async def test_nothing_is_hashed_for_instances_without_a_cache(folder: ModelFolder) -> None:
    async with running_router(folder) as router:
        instance = router.router.serving.registry.find("prefill-a")
        pages = NeverHashed(PROMPT, b"")
        assert instance.usable_tokens(pages, 0.0) == 0
        instance.routed(pages, 0.0)
