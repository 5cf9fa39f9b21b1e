"""Answers, whole and streamed: channels, order of events, log probabilities, usage, stops."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from k3.types import Speculation
from k3.v1 import common_pb2
from tests.unit.router.conftest import RunningRouter

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
TURN = (
    "Because.<|close|>think<|sep|><|open|>response<|sep|>Answer: 中<|close|>response<|sep|>"
    "<|close|>message<|sep|><|end_of_msg|>"
)


@pytest.fixture
def router(module_router: RunningRouter) -> RunningRouter:
    """One router for all tests here; its engine as new."""
    module_router.decode.reset()
    return module_router


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token] for token in ids]


async def events(router: RunningRouter, path: str, **fields: Any) -> list[Any]:
    answer = await router.client.post(path, json={**fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def deltas(chunks: list[Any], field: str, index: int = 0) -> str:
    return "".join(
        choice["delta"].get(field) or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


async def test_a_chat_answer_has_reasoning_and_content_apart(router: RunningRouter) -> None:
    ids = router.ids(TURN)
    router.decode.script = [ids[:5], ids[5:]]
    router.decode.cached_tokens = 16
    answer = (await router.client.post(CHAT, json={"messages": HELLO})).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "Answer: 中", "refusal": None, "reasoning_content": "Because.",
    }  # fmt: skip
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["id"].startswith("chatcmpl-")
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_a_chat_stream_has_its_events_in_order(router: RunningRouter) -> None:
    router.decode.script = one_by_one(router.ids(TURN))
    chunks = await events(router, CHAT, messages=HELLO, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert deltas(chunks, "reasoning_content") == "Because."
    assert deltas(chunks, "content") == "Answer: 中"
    *texts, finish, usage = chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in texts)
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(router.ids(TURN))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(c["id"], c["created"], c["object"]) for c in chunks}) == 1


async def test_continuous_usage_grows(router: RunningRouter) -> None:
    router.decode.script = one_by_one(router.ids("abc"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(router, TEXT, prompt="x", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert all("cached_tokens" in c["usage"]["prompt_tokens_details"] for c in chunks)


async def test_samples_stream_side_by_side_with_one_finish_each(router: RunningRouter) -> None:
    router.decode.script = one_by_one(router.ids(TURN))
    chunks = await events(router, CHAT, messages=HELLO, n=3)
    for index in range(3):
        assert deltas(chunks, "content", index) == "Answer: 中"
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [bool(choice["finish_reason"]) for choice in mine].count(True) == 1
        assert mine[-1]["finish_reason"] == "stop"


async def test_streamed_and_whole_text_are_equal(router: RunningRouter) -> None:
    router.decode.script = [*one_by_one(router.ids("ein 中 Text\n")), [0xE4]]
    router.decode.finish = common_pb2.FINISH_REASON_LENGTH
    whole = (await router.client.post(TEXT, json={"prompt": "x"})).json()
    chunks = await events(router, TEXT, prompt="x")
    assert whole["choices"][0]["text"] == "ein 中 Text\n\ufffd"
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    assert whole["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.dspark
async def test_a_stop_string_ends_the_request_and_cancels_decode(router: RunningRouter) -> None:
    tokens = router.ids("one two END three")
    router.decode.script = [*one_by_one(tokens), "hold"]
    router.decode.cached_tokens, router.decode.speculation = 2, Speculation((1, 0, 1), 4)
    body = {"prompt": "x", "stop": ["END", "never"], "return_spec_stats": True}
    answer = (await router.client.post(TEXT, json=body)).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer["metrics"]["speculative_decoding"]["acceptance_histogram"] == [1, 0, 1]
    assert answer["choices"][0]["text"] == "one two "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == "END"
    await router.decode.cancelled.wait()
    body = {"prompt": "x", "stop": "END", "include_stop_str_in_output": True}
    answer = (await router.client.post(TEXT, json=body)).json()
    assert answer["choices"][0]["text"] == "one two END"


async def test_a_stop_id_is_reported_and_its_text_left_out(router: RunningRouter) -> None:
    router.decode.script = [[ord("a"), ord("Z")]]
    router.decode.stop_token_id = ord("Z")
    answer = (
        await router.client.post(TEXT, json={"prompt": "x", "stop_token_ids": [ord("Z")]})
    ).json()
    assert answer["choices"][0]["text"] == "a"
    assert answer["choices"][0]["stop_reason"] == ord("Z")
    assert answer["usage"]["completion_tokens"] == 2


def with_logprobs(ids: list[int]) -> list[common_pb2.Token]:
    def top(token: int) -> list[common_pb2.TokenLogprob]:
        return [
            common_pb2.TokenLogprob(token_id=token, logprob=-0.5),
            common_pb2.TokenLogprob(token_id=ord("q"), logprob=-math.inf),
        ]

    return [common_pb2.Token(id=token, logprob=-0.5, top=top(token)) for token in ids]


async def test_chat_logprobs_have_an_item_per_token(router: RunningRouter) -> None:
    ids = [0xE4, 0xB8, 0xAD, *router.ids("a<|end_of_msg|>")]
    router.decode.script = [with_logprobs(ids[:2]), with_logprobs(ids[2:])]
    body = {
        "messages": HELLO, "logprobs": True, "top_logprobs": 2,
        "chat_template_kwargs": {"thinking": False}, "return_token_ids": True,
    }  # fmt: skip
    answer = (await router.client.post(CHAT, json=body)).json()
    (choice,) = answer["choices"]
    items = choice["logprobs"]["content"]
    assert [item["token"] for item in items] == [
        "bytes:\\xe4", "bytes:\\xb8", "bytes:\\xad", "a", "<|end_of_msg|>",
    ]  # fmt: skip
    assert items[0]["bytes"] == [0xE4]
    assert items[0]["logprob"] == -0.5
    assert [entry["logprob"] for entry in items[0]["top_logprobs"]] == [-0.5, -9999.0]
    assert choice["token_ids"] == ids
    assert answer["prompt_token_ids"] == list(router.decode.requests[0].token_ids)
    chunks = await events(router, CHAT, **body)
    streamed = [c["choices"][0] for c in chunks]
    assert [t for choice in streamed for t in choice["token_ids"]] == ids
    content = [i for c in streamed if c["logprobs"] for i in c["logprobs"]["content"]]
    assert content == items
    first = next(choice for choice in streamed if choice["delta"].get("content"))
    assert first["logprobs"]["content"] == items  # no piece of a character travels without the rest


async def test_text_logprobs_have_offsets_and_top_maps(router: RunningRouter) -> None:
    router.decode.script = [with_logprobs(router.ids("a中b"))]
    answer = (await router.client.post(TEXT, json={"prompt": "x", "logprobs": 2})).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "q": -9999.0}
    assert answer["choices"][0]["text"] == "a中b"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_headers_of_an_answer(router: RunningRouter, path: str) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    router.decode.script = [[97]]
    answer = await router.client.post(path, json=body, headers={"X-Request-Id": "my:id-1"})
    assert answer.headers["x-request-id"] == "my:id-1"
    timing = answer.headers["server-timing"]
    assert [part.split(";")[0] for part in timing.split(", ")] == [
        "queue", "pair", "prefill", "transfer", "decode",
    ]  # fmt: skip
    assert "transfer;dur=2.0" in timing
    assert router.decode.requests[-1].request_id == "my:id-1"
    bad = await router.client.post(
        path, json=body, headers={"X-Request-Id": "bad id\u00e9".encode()}
    )
    assert bad.headers["x-request-id"].startswith("req-")
