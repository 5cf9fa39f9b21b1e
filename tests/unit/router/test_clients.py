"""The official openai client, unmodified: sync, async, streaming, raw, errors and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import openai
import pytest

from k3.errors import GroupFailed, QueueFull
from tests.unit.router.conftest import RunningRouter
from tests.unit.router.fake_engine import CUT

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO: Any = [{"role": "user", "content": "hi"}]
TURN = "Because.<|close|>think<|sep|><|open|>response<|sep|>Answer: 中<|close|>response<|sep|><|end_of_msg|>"
T = TypeVar("T")


@pytest.fixture
def router(module_router: RunningRouter) -> RunningRouter:
    """One router for all tests here; its engine as new."""
    module_router.decode.reset()
    return module_router


def settings(router: RunningRouter) -> dict[str, Any]:
    return {"base_url": f"{router.url}/v1", "api_key": "none", "timeout": 10.0}


async def in_thread(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work)


async def test_sync_client_chats_and_lists_models(router: RunningRouter) -> None:
    router.decode.script = [router.ids(TURN)]

    def work() -> tuple[Any, Any]:
        with openai.OpenAI(**settings(router)) as client:
            answer = client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=99, temperature=0, logprobs=False
            )
            return answer, list(client.models.list())

    answer, models = await in_thread(work)
    assert answer.choices[0].message.content == "Answer: 中"
    assert answer.choices[0].message.reasoning_content == "Because."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert answer._request_id.startswith("req-")
    assert [model.id for model in models] == ["tiny"]


async def test_sync_client_streams(router: RunningRouter) -> None:
    router.decode.script = [[token] for token in router.ids(TURN)]

    def work() -> list[Any]:
        with openai.OpenAI(**settings(router)) as client:
            stream: Iterator[Any] = client.chat.completions.create(
                model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            return list(stream)

    chunks = await in_thread(work)
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == "Answer: 中"
    assert chunks[-1].usage.completion_tokens == len(router.ids(TURN))


async def test_async_client_completes_and_streams_text(router: RunningRouter) -> None:
    router.decode.script = [[token] for token in router.ids("some text")]
    async with openai.AsyncOpenAI(**settings(router)) as client:
        whole = await client.completions.create(
            model="tiny", prompt=["a", "b"], n=2, seed=1, stop=["never"], logprobs=None
        )
        assert [choice.text for choice in whole.choices] == ["some text"] * 4
        stream = await client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "some text"


async def test_async_chat_stream_helper_accumulates(router: RunningRouter) -> None:
    router.decode.script = [[token] for token in router.ids(TURN)]
    async with openai.AsyncOpenAI(**settings(router)) as client:
        async with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Answer: 中"


async def test_raw_responses_show_headers(router: RunningRouter) -> None:
    router.decode.script = [[97]]
    async with openai.AsyncOpenAI(**settings(router)) as client:
        raw = await client.completions.with_raw_response.create(
            model="tiny", prompt="x", seed=7, extra_headers={"X-Request-Id": "mine"}
        )
        assert (raw.headers["x-seed"], raw.headers["x-request-id"]) == ("7", "mine")
        assert raw.parse().choices[0].text == "a"


async def test_errors_arrive_as_the_clients_own_classes(router: RunningRouter) -> None:
    async with openai.AsyncOpenAI(**settings(router), max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt", prompt="x")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="x", temperature=9)
        assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
        router.decode.script = [QueueFull("full")]
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="tiny", prompt="x")
        assert limited.value.code == "capacity_exceeded"


async def test_the_client_does_not_repeat_what_was_already_billed(router: RunningRouter) -> None:
    router.decode.script = [[97], GroupFailed("a rank died")]
    async with openai.AsyncOpenAI(**settings(router), max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(model="tiny", prompt="x")
    assert failed.value.status_code == 502
    assert len(router.decode.requests) == 1


async def test_the_client_raises_on_an_error_in_mid_stream(router: RunningRouter) -> None:
    router.decode.script = [[97], CUT]
    async with openai.AsyncOpenAI(**settings(router)) as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="lost"):
            await anext(chunks)
