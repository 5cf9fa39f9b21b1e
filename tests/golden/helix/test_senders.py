"""The general sender formula against a table dealt out card by card: senders/README.md."""

import json
import lzma
from pathlib import Path

import pytest

from k3.transfer.plan import Pair, expected_senders
from tests.golden.helix.senders import make
from tests.resharding import make_spec, sharding

pytestmark = pytest.mark.helix

HERE = Path(__file__).parent / "senders"
TABLE = json.loads(lzma.decompress((HERE / "senders.json.xz").read_bytes()))
HEADS, PAGE_TOKENS, CASES = TABLE["heads"], TABLE["page_tokens"], TABLE["cases"]


def pair_of(case: dict) -> Pair:
    n, p, d = len(case["kinds"]), case["prefill"], case["decode"]
    prefill = sharding(n, pp=p["pp"], tp=p["tp"], bounds=tuple(p["bounds"]))
    decode = sharding(
        n, pp=d["pp"], tp=d["tp"], cp=d["cp"], bounds=tuple(d["bounds"]), window=8, columns=3
    )
    return Pair.of(make_spec(case["kinds"], HEADS), prefill, decode)


def related(pair: Pair, sends) -> list[list[int]]:
    ranks = ((s, r) for s in range(pair.prefill.size) for r in range(pair.decode.size))
    return [[s, r] for s, r in ranks if sends(s, r)]


def test_the_table_is_what_its_script_finds_and_covers_every_shape() -> None:
    assert json.loads(json.dumps(make.cases())) == CASES
    shapes = {(c["prefill"]["tp"], c["decode"]["tp"], c["decode"]["cp"]) for c in CASES}
    assert {(8, 2, 2), (2, 4, 4), (6, 1, 3), (6, 3, 2), (1, 1, 8), (8, 1, 1)} <= shapes
    empty = [not heard for c in CASES for p in c["prompts"] for heard in p["senders"]]
    assert any(empty)  # ranks that hear from nobody


@pytest.mark.parametrize("kinds", sorted({case["kinds"] for case in CASES}))
def test_states_and_draft_rows_come_from_the_ranks_of_the_table(kinds: str) -> None:
    for case in CASES:
        if case["kinds"] != kinds:
            continue
        pair, label = pair_of(case), f"{case['prefill']} -> {case['decode']}"
        assert related(pair, pair.sends_state) == case["states"], label
        for field, heads in (("draft_copies", None), ("draft_heads", HEADS)):
            found = related(pair, lambda s, r, h=heads, p=pair: p.sends_draft(s, r, h))
            assert found == case[field], (label, field)


@pytest.mark.parametrize("kinds", sorted({case["kinds"] for case in CASES}))
def test_pages_come_from_the_senders_of_the_table_and_each_rank_expects_exactly_them(
    kinds: str,
) -> None:
    for case in CASES:
        if case["kinds"] != kinds:
            continue
        pair, label = pair_of(case), f"{case['prefill']} -> {case['decode']}"
        for prompt in case["prompts"]:
            n_pages = -(-prompt["prompt_len"] // PAGE_TOKENS)
            found = [
                [s, r, list(pages)]
                for s, r in related(pair, lambda s, r, p=pair: p.pages(s, r, 0, 1000))
                if (pages := pair.pages(s, r, 0, n_pages))
            ]
            assert found == prompt["pages"], (label, prompt["prompt_len"])
            for rank, heard in enumerate(prompt["senders"]):
                asked = expected_senders(
                    pair.spec,
                    pair.prefill,
                    pair.decode,
                    page_tokens=PAGE_TOKENS,
                    prompt_len=prompt["prompt_len"],
                    rank=rank,
                )
                assert list(asked) == heard, (label, prompt["prompt_len"], rank)
