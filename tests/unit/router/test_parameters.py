"""Request fields: what good ones become on the wire, and how each bad one is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.router.conftest import RunningRouter

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def router(module_router: RunningRouter) -> RunningRouter:
    """One router for all tests here; its engine as new."""
    module_router.decode.reset()
    return module_router


def body(path: str, **fields: Any) -> dict[str, Any]:
    start = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    return {**start, **fields}


async def refused(router: RunningRouter, path: str, **fields: Any) -> dict[str, Any]:
    answer = await router.client.post(path, json=body(path, **fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]
    return error


async def test_sampling_fields_reach_decode(router: RunningRouter) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": -1,
        "frequency_penalty": 2, "repetition_penalty": 1.5, "logit_bias": {"5": -100}, "seed": -3,
        "min_tokens": 2, "max_tokens": 9, "stop_token_ids": [65], "ignore_eos": True,
    }  # fmt: skip
    for path in (CHAT, TEXT):
        answer = await router.client.post(path, json=body(path, **fields))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-seed"] == "-3"
        sent = router.decode.requests[-1]
        sampling = sent.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (
            0.1,
            -1,
            2,
        )
        assert (sampling.repetition_penalty, sampling.seed, sampling.min_tokens) == (1.5, -3, 2)
        assert dict(sampling.logit_bias) == {5: -100}
        assert (sent.stop.max_tokens, list(sent.stop.stop_token_ids)) == (9, [65])
        assert sent.stop.ignore_eos
        assert list(sent.stop.eos_token_ids) == [3842]
        assert [c.instance_id for c in sent.candidates] == ["prefill-a"]


async def test_null_means_not_given(router: RunningRouter) -> None:
    names = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logprobs",
        "stream_options",
        "max_tokens",
        "tools",
    )
    answer = await router.client.post(CHAT, json=body(CHAT, **dict.fromkeys(names)))
    assert answer.status_code == 200, answer.text
    assert router.decode.requests[-1].sampling.temperature == 1.0


async def test_a_seed_is_drawn_when_none_is_given(router: RunningRouter) -> None:
    answers = [await router.client.post(TEXT, json=body(TEXT)) for _ in range(2)]
    seeds = [int(answer.headers["x-seed"]) for answer in answers]
    assert seeds == [request.sampling.seed for request in router.decode.requests]
    assert seeds[0] != seeds[1]


async def test_samples_share_seed_and_pair_and_differ_in_index(router: RunningRouter) -> None:
    router.decode.script = [router.ids("a"), router.ids("b")]
    answer = await router.client.post(TEXT, json=body(TEXT, n=3, seed=5, prompt=["x", "y"]))
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    sent = {request.request_id: request for request in router.decode.requests}
    assert sorted(r.sampling.sample_index for r in sent.values()) == [0, 0, 1, 1, 2, 2]
    assert {r.sampling.seed for r in sent.values()} == {5}
    assert answer.json()["usage"]["prompt_tokens"] == len(router.ids("x")) + len(router.ids("y"))
    assert answer.json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_every_form_of_prompt_is_taken(router: RunningRouter, prompt: Any) -> None:
    answer = await router.client.post(TEXT, json={"prompt": prompt})
    assert answer.status_code == 200, answer.text
    expected = [104, 105] if "hi" not in prompt else router.ids("hi")
    assert list(router.decode.requests[-1].token_ids) == expected


async def test_an_empty_prompt_is_the_bos_token(router: RunningRouter) -> None:
    await router.client.post(TEXT, json={"prompt": ""})
    assert list(router.decode.requests[-1].token_ids) == [3840]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("temperature", "1", "invalid_type"),
        ("temperature", True, "invalid_type"),
        ("temperature", 2.1, "invalid_value"),
        ("top_p", 0, "invalid_value"),
        ("top_p", 1e-320, "invalid_value"),
        ("top_k", -2, "invalid_value"),
        ("min_p", 1.5, "invalid_value"),
        ("presence_penalty", 3, "invalid_value"),
        ("repetition_penalty", 0, "invalid_value"),
        ("repetition_penalty", 1e-40, "invalid_value"),
        ("logit_bias", {"x": 1}, "invalid_value"),
        ("logit_bias", {"9999": 1}, "invalid_value"),
        ("logit_bias", [1], "invalid_type"),
        ("seed", 1.5, "invalid_type"),
        ("seed", 1 << 63, "invalid_value"),
        ("n", 0, "invalid_value"),
        ("n", 17, "invalid_value"),
        ("stop", "", "invalid_value"),
        ("stop", ["a"] * 17, "invalid_value"),
        ("stop", "x" * 257, "invalid_value"),
        ("stop_token_ids", [4096], "invalid_value"),
        ("stop_token_ids", "a", "invalid_type"),
        ("stream", "yes", "invalid_type"),
        ("stream_options", {"include_usage": True}, "invalid_value"),
        ("max_tokens", 0, "invalid_value"),
        ("max_tokens", 2.5, "invalid_type"),
        ("min_tokens", 600, "invalid_value"),
        ("user", "x" * 257, "invalid_value"),
        ("timeout_ms", 0, "invalid_value"),
        ("model", 7, "invalid_type"),
        ("response_format", {"type": "json_object"}, "unsupported_parameter"),
        ("structured_outputs", {"regex": "a"}, "unsupported_parameter"),
        ("prompt_logprobs", 0, "unsupported_parameter"),
        ("store", True, "unsupported_parameter"),
        ("priority", 1, "unsupported_parameter"),
        ("service_tier", "flex", "unsupported_parameter"),
    ],
)
async def test_a_bad_field_is_named(
    router: RunningRouter, path: str, field: str, value: Any, code: str
) -> None:
    error = await refused(router, path, **{field: value})
    assert (error["code"], error["param"].split("[")[0].split(".")[0]) == (code, field)
    assert not router.decode.requests


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_parameter",
            "messages[1].content[0].type",
        ),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"logprobs": 1}, "invalid_type", "logprobs"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "invalid_value", "max_tokens"),
        ({"max_tokens": 512}, "context_length_exceeded", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "1" * 600}]},
            "context_length_exceeded",
            "messages",
        ),
        ({"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
        ({"chat_template_kwargs": {"x": 1}}, "unsupported_parameter", "chat_template_kwargs"),
        ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
        ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ],
)
async def test_a_bad_chat_is_refused(
    router: RunningRouter, fields: dict[str, Any], code: str, param: str
) -> None:
    error = await refused(router, CHAT, **fields)
    assert (error["code"], error["param"]) == (code, param)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": 5}, "invalid_type", "prompt"),
        ({"prompt": [4096]}, "invalid_value", "prompt"),
        ({"prompt": [[1], [-1]]}, "invalid_value", "prompt[1][0]"),
        ({"prompt": ["x"] * 129}, "invalid_value", "prompt"),
        ({"prompt": "1" * 512}, "context_length_exceeded", "prompt"),
        ({"logprobs": True}, "invalid_type", "logprobs"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ],
)
async def test_a_bad_text_request_is_refused(
    router: RunningRouter, fields: dict[str, Any], code: str, param: str
) -> None:
    error = await refused(router, TEXT, **fields)
    assert (error["code"], error["param"]) == (code, param)


async def test_default_limits_are_the_rest_of_the_context_and_sixteen(
    router: RunningRouter,
) -> None:
    await router.client.post(CHAT, json=body(CHAT))
    await router.client.post(TEXT, json=body(TEXT))
    chat, text = router.decode.requests
    assert chat.stop.max_tokens == 512 - len(chat.token_ids)
    assert text.stop.max_tokens == 16


async def test_thinking_and_effort_shape_the_prompt(router: RunningRouter) -> None:
    async def prompt(**fields: Any) -> str:
        assert (await router.client.post(CHAT, json=body(CHAT, **fields))).status_code == 200
        ids = router.decode.requests[-1].token_ids
        return router.folder.tokenizer.decode(ids, skip_special_tokens=False)

    assert (await prompt()).endswith("<|open|>think<|sep|>")
    assert (await prompt(chat_template_kwargs={"thinking": False})).endswith(
        "<|open|>response<|sep|>"
    )
    assert (await prompt(reasoning_effort="none")).endswith("<|open|>response<|sep|>")
    assert "thinking_effort=low" in await prompt(reasoning_effort="minimal")
    open_turn = [*HELLO, {"role": "assistant", "content": "I thi"}]
    text = await prompt(messages=open_turn, continue_final_message=True)
    assert text.endswith("<|open|>response<|sep|>I thi")
    assert (await prompt(add_generation_prompt=False)).endswith("<|end_of_msg|>")


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"prompt": NaN}', {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"prompt": "\\ud800"}', {"content-type": "application/json"}, 400, "invalid_json"),
        (b"[]", {"content-type": "application/json"}, 400, "invalid_type"),
        (b"{}", {"content-type": "application/json"}, 400, "missing_required_parameter"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {}, 415, "unsupported_media_type"),
        (b'"' + b"x" * (17 << 20) + b'"', {"content-type": "application/json"}, 413, "request_too_large"),
        (b'{"prompt": "x", "model": "gpt"}', {"content-type": "application/json"}, 404, "model_not_found"),
        (
            b'{"prompt": "x"}',
            {"content-type": "application/json", "x-request-timeout-ms": "soon"},
            400,
            "invalid_value",
        ),
    ],
)  # fmt: skip
async def test_a_bad_request_has_the_right_status(
    router: RunningRouter, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    answer = await router.client.post(TEXT, content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


async def test_unknown_fields_are_counted(router: RunningRouter) -> None:
    assert (await router.client.post(TEXT, json=body(TEXT, frobnicate=1))).status_code == 200
    metrics = (await router.client.get("/metrics")).text
    assert 'k3_router_unknown_params_total{field="frobnicate"} 1.0' in metrics
