"""How the frozen suites were made: `python -m training.suites` writes `k3/assets/eval/` again, byte for byte.

Items, checks and reading are `k3.bench.suites` and `k3.bench.scoring`. Seeds differ from all training seeds.
"""

import argparse
import json
import lzma
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from k3.bench.suites import FOLDER, NAMES, Item
from training import tokenizer
from training.chat import ChatCodec
from training.data import lists, recall, talk, tools
from training.data.problems import (
    HELDOUT_FORMS,
    HELDOUT_SKELETONS,
    Problem,
    chain_problem,
    problem,
    story,
)

_N_ITEMS = 200
_PER_SKELETON = 8
_LARGE_BYTES = 100_000


def line(item: Item) -> str:
    """The JSON line of an item."""
    fields = {
        "id": item.id,
        "turns": item.turns,
        "tools": item.tools,
        "answer": item.answer,
        "check": item.check,
    }
    return json.dumps(fields, ensure_ascii=False)


def write(name: str, items: list[Item], folder: Path) -> Path:
    """Write a suite, compressed when large."""
    text = "".join(line(item) + "\n" for item in items)
    folder.mkdir(parents=True, exist_ok=True)
    if len(text) < _LARGE_BYTES:
        path = folder / f"{name}.jsonl"
        path.write_text(text, encoding="utf-8")
    else:
        path = folder / f"{name}.jsonl.xz"
        path.write_bytes(lzma.compress(text.encode(), preset=9))
    return path


def _user(text: str) -> tuple[Mapping[str, str], ...]:
    return ({"role": "user", "content": text},)


def _arithmetic(identity: str, p: Problem) -> Item:
    return Item(identity, _user(p.question), None, p.response, "answer_line")


def _long_recall(
    codec: ChatCodec, n_tokens: int, n_facts: int, identity: str, rng: random.Random
) -> Item:
    """One document of about `n_tokens` with one fact (a pass key) or sixteen, and one question."""
    known = recall.facts(n_facts, n_facts == 1, rng, "fact_forward")
    room = n_tokens - 32 - sum(len(codec.text(fact.sentence)) + 1 for fact in known)
    lines: list[str] = []
    while room > 0:
        line = recall.filler_line(rng)
        text = recall.PARAGRAPHS[line] if isinstance(line, int) else line
        lines.append(text)
        room -= len(codec.text(text + "\n"))
    places = recall.places(len(lines), n_facts, rng)
    for place, fact in sorted(
        zip(places, known, strict=True), reverse=True, key=lambda pair: pair[0]
    ):
        lines.insert(place, fact.sentence)
    asked = rng.choice(known)
    return Item(identity, _user("\n".join([*lines, asked.question])), None, asked.value, "response")


def _tools(codec: ChatCodec, identity: str, rng: random.Random) -> Item:
    task = tools.tool_task(rng)
    raw = codec.encoding.decode(codec.call(task.name, task.arguments))
    return Item(identity, _user(task.question), task.tools, raw, "raw")


def _task(identity: str, task: lists.Task) -> Item:
    return Item(identity, _user(task.question), None, task.response, "response")


def _chat(identity: str, rng: random.Random) -> Item:
    question, answer = talk.chat(rng)
    return Item(identity, _user(question), None, answer, "response")


def build(name: str, codec: ChatCodec) -> list[Item]:
    """All items of a suite."""
    if name == "arith_skeletons":
        return [
            _arithmetic(
                f"{name}-{at:02d}-{j}", chain_problem(chain, random.Random(f"eval {name} {at} {j}"))
            )
            for at, chain in enumerate(HELDOUT_SKELETONS)
            for j in range(_PER_SKELETON)
        ]
    lengths = {"1k": 1024, "4k": 4096, "8k": 8192}
    one: Callable[[str, random.Random], Item]
    match name.split("_"):
        case ["arith", "seen"]:
            one = lambda i, rng: _arithmetic(i, problem(rng))  # noqa: E731
        case ["arith", "forms"]:
            one = lambda i, rng: _arithmetic(i, story(rng, HELDOUT_FORMS))  # noqa: E731
        case ["passkey", size]:
            one = lambda i, rng: _long_recall(codec, lengths[size], 1, i, rng)  # noqa: E731
        case ["facts16", size]:
            one = lambda i, rng: _long_recall(codec, lengths[size], 16, i, rng)  # noqa: E731
        case ["copy"]:
            one = lambda i, rng: _task(i, lists.copy(rng))  # noqa: E731
        case ["lists"]:
            one = lambda i, rng: _task(i, lists.listing(rng))  # noqa: E731
        case ["tools"]:
            one = lambda i, rng: _tools(codec, i, rng)  # noqa: E731
        case ["chat"]:
            one = _chat
        case ["open"]:
            one = lambda i, rng: Item(i, _user(talk.continuation(rng)[0]), None, None, "none")  # noqa: E731
        case _:
            raise ValueError(f"unknown suite {name!r}; expected one of {', '.join(NAMES)}")
    return [one(f"{name}-{i:03d}", random.Random(f"eval {name} {i}")) for i in range(_N_ITEMS)]


def main() -> None:
    """Write all suites."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="tiktoken.model that sets the lengths"
    )
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    codec = ChatCodec(tokenizer.load(arguments.tokenizer))
    for name in NAMES:
        path = write(name, build(name, codec), arguments.out)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
