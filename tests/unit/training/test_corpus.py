"""Documents, chat form and packing: exact ids, nothing truncated, everything a function of its seed."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.bench import suites as frozen
from training import suites, tokenizer
from training.chat import ChatCodec
from training.data import recall
from training.data.mixture import ANSWER, Maker, Mixture
from training.data.packing import Plan, make_batch

ROOT = Path(__file__).parents[3]
TIKTOKEN = ROOT / "k3/assets/tiny/tiktoken.model"
CHAT = {c["name"]: c for c in json.loads((ROOT / "tests/golden/k3/chat.json").read_text())}
CODEC = ChatCodec(tokenizer.load(TIKTOKEN))
MAKER = Maker(CODEC, Mixture())
SHORT = ("arithmetic", "copy", "lists", "tools", "short_recall", "chat", "open")


def segment_ids(name: str) -> list[int]:
    special = CODEC.special.names()
    out: list[int] = []
    for text, is_special in CHAT[name]["segments"]:
        out += [special[text]] if is_special else CODEC.text(text)
    return out


def test_no_rank_has_two_digits() -> None:
    ranks = tokenizer.read_tiktoken(TIKTOKEN)
    assert len(ranks) == tokenizer.N_RANKS
    assert not [rank for rank in ranks if sum(chr(byte).isdigit() for byte in rank) > 1]


def test_learning_ranks_keeps_digits_apart_and_does_not_depend_on_anything_but_the_text() -> None:
    texts = ["the 12 bells of the 345 towers", "the towers of the bells 12 12"] * 3
    ranks = tokenizer.train(texts, 270)
    assert ranks == tokenizer.train(list(texts), 270)
    assert ranks[:256] == [bytes([b]) for b in range(256)]
    assert not [rank for rank in ranks if sum(chr(byte).isdigit() for byte in rank) > 1]


@pytest.mark.parametrize("name", ["plain", "injection", "history_no_reasoning"])
def test_prompts_are_encoded_segment_by_segment_as_in_the_published_renderer(name: str) -> None:
    case = CHAT[name]
    assert CODEC.prompt(case["messages"], case["tools"]) == segment_ids(name)


def test_tool_declaration_and_call_are_written_as_in_the_published_renderer() -> None:
    rendered = CHAT["tool_roundtrip"]["rendered"]
    tools = CHAT["tool_roundtrip"]["tools"]
    decode = CODEC.encoding.decode
    assert rendered.startswith(decode(CODEC.tools(tools)))
    call = decode(CODEC.call("get_weather", {"city": "Oslo"}))
    inner = call.split("<|open|>tools<|sep|>", 1)[1].replace('index="1"', 'index="2"')
    assert inner in rendered


@given(seed=st.integers(0, 2**32))
def test_filler_lines_may_be_encoded_once_and_concatenated(seed: int) -> None:
    rng = random.Random(seed)
    lines = [recall.filler_line(rng) for _ in range(6)]
    texts = [(recall.PARAGRAPHS[x] if isinstance(x, int) else x) + "\n" for x in lines]
    texts += [fact.sentence + "\n" for fact in recall.facts(3, False, rng)] + ["What is it?"]
    rng.shuffle(texts[:-1])
    apart = [token for text in texts for token in CODEC.text(text)]
    assert apart == CODEC.text("".join(texts)), f"seed {seed}"


@pytest.mark.parametrize("task", SHORT)
def test_a_document_ends_with_an_answer_and_never_trains_its_first_token(task: str) -> None:
    for seed in range(10):
        document = MAKER.task(task, random.Random(f"{task} {seed}"))
        assert len(document.ids) == len(document.classes)
        assert document.classes[0] == 0
        assert document.classes[-1] == ANSWER
        assert document.ids[-1] == CODEC.special.end_of_msg


def test_a_batch_is_a_function_of_seed_and_step_and_truncates_nothing() -> None:
    plan = Plan(2048, 10, 5, Mixture(), TIKTOKEN)
    batch = make_batch(MAKER, plan, 3)
    again = make_batch(Maker(CODEC, Mixture()), plan, 3)
    assert np.array_equal(batch.ids, again.ids)
    assert np.array_equal(batch.starts, again.starts)
    bounds = batch.starts.tolist()
    padded = batch.ids[bounds[-2]] == CODEC.special.pad
    for end in bounds[1 : len(bounds) - int(padded)]:
        assert batch.ids[end - 1] == CODEC.special.end_of_msg
    assert not np.array_equal(batch.ids, make_batch(MAKER, plan, 4).ids)


def test_the_corpus_does_not_depend_on_the_order_of_hashes() -> None:
    program = (
        "import random, zlib; from training.data import recall, problems;"
        "r = random.Random(9); t = [problems.problem(r).question for _ in range(50)];"
        "t += [f.sentence for f in recall.facts(12, False, r)]; print(zlib.crc32(repr(t).encode()))"
    )
    sums = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(sums) == 1


@pytest.mark.parametrize("name", ["arith_seen", "arith_forms", "arith_skeletons", "lists", "tools"])
def test_the_frozen_suite_is_what_its_code_makes(name: str) -> None:
    made = suites.build(name, CODEC)
    assert [suites.line(item) for item in made] == [suites.line(i) for i in frozen.read(name)]


@pytest.mark.parametrize("name", frozen.NAMES)
def test_every_suite_has_two_hundred_distinct_items(name: str) -> None:
    items = frozen.read(name)
    assert 200 <= len(items) <= 500
    assert len({item.id for item in items}) == len(items)


@pytest.mark.parametrize("name", ["passkey_8k", "facts16_4k"])
def test_long_items_hold_their_answer_once_and_are_as_long_as_their_name_says(name: str) -> None:
    size = {"4k": 4096, "8k": 8192}[name.split("_")[1]]
    for item in frozen.read(name, 5):
        text = item.turns[0]["content"]
        assert text.count(str(item.answer)) == 1
        assert 0.9 * size < len(CODEC.prompt(item.turns)) < 1.15 * size
