"""Asking items over HTTP: what is sent, what counts as right, and that every failure is a wrong answer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from k3.bench.accuracy import (
    SuiteFigures,
    acceptance_table,
    as_json,
    markdown,
    plot,
    summarize,
    table,
    wilson,
)
from k3.bench.answers import Answer, Asker
from k3.bench.eval import part
from k3.bench.speculation import Acceptance
from k3.bench.suites import Item
from k3.errors import ConfigError, K3Error

Json = dict[str, Any]
Handler = Callable[[str, Json], tuple[int, Json]]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SPEC = {"speculative_decoding": {"acceptance_histogram": [1, 0, 2]}}


def item(*contents: str, **changes: Any) -> Item:
    turns = tuple({"role": "user", "content": text} for text in contents or ("q",))
    fields: Json = {"id": "s-0", "turns": turns, "tools": None, "answer": "7", "check": "response"}
    return Item(**(fields | changes))


def chat(text: str | None, n_tokens: int = 5, finish: str = "stop", **more: Any) -> Json:
    choice = {"message": {"content": text}, "finish_reason": finish}
    return {"choices": [choice], **usage(n_tokens), **more}


def text(value: str, n_tokens: int = 5) -> Json:
    return {"choices": [{"text": value, "finish_reason": "stop"}], **usage(n_tokens)}


def usage(n_tokens: int) -> Json:
    return {"usage": {"prompt_tokens": 11, "completion_tokens": n_tokens}}


class Server:
    """An HTTP server in this process: answers from a script, remembers what it was asked."""

    def __init__(self, handler: Handler, *, has_spec: bool = False) -> None:
        self.asked: list[tuple[str, Json]] = []
        self._handler = handler
        self._has_spec = has_spec

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "mini"}]})
        path, body = request.url.path, json.loads(request.content)
        if not self.asked and body.get("max_tokens") == 1:  # the probe
            self.asked.append((path, body))
            refusal = {"error": {"code": "unsupported_parameter", "message": "return_spec_stats"}}
            return httpx.Response(200 if self._has_spec else 400, json=refusal)
        self.asked.append((path, body))
        status, answer = self._handler(path, body)
        return httpx.Response(status, json=answer)

    async def ask(self, *items: Item, suite: str = "lists") -> list[Answer]:
        transport = httpx.MockTransport(self._answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            asker = await Asker.open(client, 2)
            assert asker.model == "mini"
            return await asker.suite(suite, list(items))


async def test_a_question_is_sent_greedily_with_the_suites_limit() -> None:
    server = Server(lambda path, body: (200, chat("7")))
    (answer,) = await server.ask(item("How many?"))
    path, body = server.asked[-1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "How many?"}]
    assert (body["temperature"], body["max_completion_tokens"]) == (0, 64)
    assert "return_spec_stats" not in body
    assert (answer.is_right, answer.ends_itself, answer.error) == (True, True, "")
    assert (answer.prompt_tokens, answer.output_tokens) == (11, 5)


async def test_follow_up_turns_continue_the_conversation_with_the_models_own_answers() -> None:
    def handler(path: str, body: Json) -> tuple[int, Json]:
        return 200, chat("7" if len(body["messages"]) == 5 else "first")

    given = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "given"},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "c"},
    )
    server = Server(handler)
    (answer,) = await server.ask(item(turns=given))
    first, second = (body["messages"] for _, body in server.asked[-2:])
    assert first == list(given[:3])
    assert second == [*given[:3], {"role": "assistant", "content": "first"}, given[3]]
    assert answer.is_right is True
    assert answer.output_tokens == 10


async def test_tools_go_as_prompt_ids_and_come_back_with_their_tags() -> None:
    def handler(path: str, body: Json) -> tuple[int, Json]:
        return (200, {"tokens": [5, 6]}) if path == "/tokenize" else (200, text("<|sep|>f"))

    server = Server(handler)
    (answer,) = await server.ask(item(tools=(TOOL,), check="raw", answer="<|sep|>f"), suite="tools")
    (_, rendered), (path, body) = server.asked[-2:]
    assert rendered["tools"] == [TOOL]
    assert (path, body["prompt"]) == ("/v1/completions", [5, 6])
    assert body["skip_special_tokens"] is False
    assert body["include_stop_str_in_output"] is True
    assert answer.is_right is True


async def test_open_items_are_sampled_with_their_number_as_seed_and_not_scored() -> None:
    server = Server(lambda path, body: (200, chat("x", finish="length")))
    answers = await server.ask(*[item(check="none", answer=None)] * 3, suite="open")
    seeds = sorted(body["seed"] for _, body in server.asked[1:])
    assert seeds == [0, 1, 2]
    assert {body["temperature"] for _, body in server.asked[1:]} == {1}
    assert [a.is_right for a in answers] == [None] * 3
    assert not any(a.ends_itself for a in answers)


@pytest.mark.parametrize(
    "status, body, error",
    [
        (429, {"error": {"code": "queue_full", "message": "m"}}, "HTTP 429 queue_full: m"),
        (502, {"detail": "gone"}, "HTTP 502"),
        (200, {"choices": []}, "not a completion"),
    ],
)
async def test_every_failure_is_a_wrong_answer_with_its_reason(
    status: int, body: Json, error: str
) -> None:
    (answer,) = await Server(lambda path, _: (status, body)).ask(item())
    assert answer.is_right is False
    assert answer.error.startswith(error)
    assert not answer.ends_itself


async def test_a_broken_connection_is_a_wrong_answer() -> None:
    def handler(path: str, body: Json) -> tuple[int, Json]:
        raise httpx.ReadError("gone")

    (answer,) = await Server(handler).ask(item())
    assert (answer.is_right, answer.error) == (False, "transport: ReadError")


async def test_acceptance_is_asked_for_and_added_up_where_it_is_served() -> None:
    server = Server(lambda path, body: (200, chat("7", metrics=SPEC)), has_spec=True)
    answers = await server.ask(item(), item("q", "r"))
    assert server.asked[-1][1]["return_spec_stats"] is True
    figures = summarize("lists", answers, 2.0)
    assert figures.acceptance is not None
    assert figures.acceptance.histogram == (3, 0, 6)
    assert "| lists | 9 | 2.33 | 67 | 67 |" in markdown([figures], {})


async def test_without_a_server_there_is_an_error_that_says_so() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as client:
        with pytest.raises(K3Error, match="ConnectError"):
            await Asker.open(client, 1)


async def test_errors_are_in_every_share_and_wrong_answers_in_the_json() -> None:
    def handler(path: str, body: Json) -> tuple[int, Json]:
        match body["messages"][0]["content"]:
            case "right":
                return 200, chat("7", n_tokens=6)
            case "wrong":
                return 200, chat("8", n_tokens=2)
            case _:
                return 503, {}

    answers = await Server(handler).ask(item("right"), item("wrong"), item("lost"))
    figures = summarize("lists", answers, 4.0)
    assert (figures.n, figures.n_right, figures.n_errors) == (3, 1, 1)
    assert figures.accuracy == pytest.approx(1 / 3)
    assert figures.self_ending == pytest.approx(2 / 3)
    assert figures.output_tokens_per_s == pytest.approx(2.0)
    tree = as_json([figures], answers, {"model": "mini"})
    json.dumps(tree)
    assert [w["got"] for w in tree["wrong"]] == ["8", ""]
    assert tree["suites"]["lists"]["acceptance"] is None


def test_the_interval_holds_the_share_and_stays_within_zero_and_one() -> None:
    none, half, all_ = wilson(0, 20), wilson(10, 20), wilson(20, 20)
    assert none.low == 0.0
    assert none.high == pytest.approx(0.161, abs=1e-3)
    assert half.low < 0.5 < half.high
    assert all_.high == pytest.approx(1.0)
    assert all_.low == pytest.approx(0.839, abs=1e-3)


def test_both_tables_fit_80_columns_with_seven_drafts() -> None:
    acceptance = Acceptance((1, 0, 0, 0, 0, 0, 0, 123_456))
    figures = SuiteFigures(
        suite="arith_skeletons", n=256, n_right=256, accuracy=1.0, interval=wilson(256, 256),
        self_ending=1.0, n_errors=0, prompt_tokens=1, output_tokens=200_000, time_s=1234.5,
        acceptance=acceptance,
    )  # fmt: skip
    for made in (table([figures]), acceptance_table([figures])):
        out = io.StringIO()
        Console(file=out, width=80).print(made)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        assert sum("arith_skeletons" in line for line in lines) == 1
        assert len(lines) == 6, "no cell may wrap"


async def test_the_plot_is_a_png_without_the_suites_that_are_not_scored(tmp_path: Path) -> None:
    server = Server(lambda path, body: (200, chat("7")))
    figures = [
        summarize("lists", await server.ask(item()), 1.0),
        summarize("open", await server.ask(item(check="none", answer=None)), 1.0),
    ]
    plot(figures, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "| open | 1 | - | - |" in markdown(figures, {})


def test_parts_of_a_suite_are_all_of_it_and_disjoint() -> None:
    items = list(range(7))
    parts = [items[part(f"{number}/3")] for number in (1, 2, 3)]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "-1/3", "a/b", "1/2/3"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected K/N"):
        part(text)
