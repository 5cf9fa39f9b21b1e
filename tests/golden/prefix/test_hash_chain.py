"""KVH1 against published digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3.cache.hash_chain import Extra, page_hashes, root

pytestmark = pytest.mark.prefill

CASES = json.loads((Path(__file__).parent / "hash_chain.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_chain_of_a_prompt(case: dict[str, Any]) -> None:
    page_tokens = case["hash_block_tokens"]
    salt = case["salt"].encode()
    parent = root(case["namespace"], page_tokens, adapter=case["adapter"], salt=salt)
    assert parent.hex() == case["root"]
    extras = [Extra(*extra) for extra in case["extras"]]
    hashes = page_hashes(parent, case["tokens"], page_tokens, extras)
    assert [h.hex() for h in hashes] == case["blocks"]


PLAIN = [case for case in CASES if not case["extras"]]  # their offsets count from the first token


@pytest.mark.parametrize("case", PLAIN, ids=[case["id"] for case in PLAIN])
def test_a_chain_can_be_continued_from_any_page(case: dict[str, Any]) -> None:
    page_tokens, tokens = case["hash_block_tokens"], case["tokens"]
    parent = root(
        case["namespace"], page_tokens, adapter=case["adapter"], salt=case["salt"].encode()
    )
    whole = page_hashes(parent, tokens, page_tokens)
    for page, digest in enumerate(whole):
        rest = page_hashes(digest, tokens[(page + 1) * page_tokens :], page_tokens)
        assert rest == whole[page + 1 :]
