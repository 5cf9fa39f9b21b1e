"""The model and the cluster that chaos tests hurt."""

import random

import pytest

from k3.types import SamplingParams
from tests.e2e.nano import nano_folder
from tests.e2e.oracle import Oracle

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return nano_folder(tmp_path_factory.mktemp("model") / "k3-nano")


@pytest.fixture(scope="session")
def truth(folder):
    """Checks an answer against the plain forward."""
    oracle = Oracle(folder)

    def check(prompt: list[int], tokens: list[int]) -> None:
        assert tokens, "no tokens to compare"
        assert [event.id for event in oracle.redraw(prompt, tokens, GREEDY)] == tokens

    return check


@pytest.fixture(scope="session")
def prompt_of():
    """Random but fixed prompts by length."""

    def make(n: int, seed: int = 0) -> list[int]:
        rng = random.Random(1000 * n + seed)
        return [rng.randrange(256) for _ in range(n)]

    return make
