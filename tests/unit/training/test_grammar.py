"""Templates draw what their patterns match; the grammar is large; held-out texts are out of its reach."""

import random
import re
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data import words
from training.data.grammar import Grammar, Sequence, parse, words_of
from training.data.problems import (
    CHAINS,
    HELDOUT_FORMS,
    HELDOUT_SKELETONS,
    STORIES,
    Chain,
    chain_problem,
    problem,
    story,
)

EVENTS = ("gain", "loss", "gain_groups", "loss_groups", "times2", "times", "half", "share")
TEXTS = {
    "A": words.NAMES,
    "B": words.NAMES,
    "C": words.NAMES,
    "items": [plural for plural, _ in words.ITEMS],
    "item": [single for _, single in words.ITEMS],
    "boxes": [plural for _, plural in words.BOXES],
    "box": [single for single, _ in words.BOXES],
    "he": ["he", "she", "his", "her", "him"],
    "kids": words.KIDS,
    "people": words.PEOPLE,
    "day": words.DAYS,
    "place": words.PLACES,
}
SAME = {"He": "he", "his": "he", "him": "he", "his2": "he", "items2": "items", "item2": "item"}
SAME |= {"boxes2": "boxes", "box2": "box"}
SLOTS = dict.fromkeys("abcdkmnpqtvw", r"\d+") | {name: "|".join(t) for name, t in TEXTS.items()}
SLOTS |= {name: SLOTS[other] for name, other in SAME.items()}


def pattern(grammar: Grammar, frame: Sequence) -> re.Pattern[str]:
    return re.compile(r"\s*" + grammar.pattern(frame, SLOTS) + r"\s*", re.IGNORECASE)


TRAINING = [pattern(STORIES, frame) for frames in STORIES.sections.values() for frame in frames] + [
    pattern(STORIES, wording) for chain in CHAINS for wording in chain.wordings
]


def drawn(frame: Sequence, seed: int, grammar: Grammar = STORIES) -> str:
    rng = random.Random(seed)
    numbers = {slot: rng.randint(2, 99) for slot in "abcdkmnpqtvw"}
    return grammar.fill(frame, {**words.scene(rng), **numbers}, rng)


def test_unbalanced_brackets_are_refused_with_the_template() -> None:
    with pytest.raises(ValueError, match=r"missing \]"):
        parse("a [b|c")


def test_tidy_text_has_capitals_and_no_stray_spaces() -> None:
    grammar = Grammar({})
    text = grammar.fill(parse("[|] one {x} . two [|], three ?"), {"x": "X"}, random.Random(1))
    assert text == "One X. Two, three?"


@given(seed=st.integers(0, 2**32), which=st.integers(0, len(TRAINING) - 1))
def test_every_drawn_text_matches_the_pattern_of_its_template(seed: int, which: int) -> None:
    frames = [f for frames in STORIES.sections.values() for f in frames]
    frames += [wording for chain in CHAINS for wording in chain.wordings]
    assert TRAINING[which].fullmatch(drawn(frames[which], seed)), f"seed {seed}, template {which}"


def test_the_grammar_has_ten_thousand_event_sentences() -> None:
    assert sum(STORIES.count(f) for kind in EVENTS for f in STORIES.sections[kind]) >= 10_000


def test_there_are_sixty_chains_of_five_wordings_each() -> None:
    by_program: dict[str, int] = {}
    for chain in CHAINS:
        by_program[chain.source] = by_program.get(chain.source, 0) + len(chain.wordings)
    assert len(by_program) >= 60
    assert min(by_program.values()) >= 5


def test_at_least_twenty_four_skeletons_are_held_out() -> None:
    assert sum(len(chain.wordings) for chain in HELDOUT_SKELETONS) >= 24


@pytest.mark.parametrize("kind", ["gain", "loss"])
def test_no_training_template_makes_a_held_out_sentence(kind: str) -> None:
    for frame in HELDOUT_FORMS.sections[kind]:
        sentence = drawn(frame, 7)
        makers = [p.pattern for p in TRAINING if p.fullmatch(sentence)]
        assert not makers, f"{sentence!r} is made by {makers}"


def test_no_training_template_makes_a_held_out_problem() -> None:
    for chain in HELDOUT_SKELETONS:
        for wording in chain.wordings:
            text = drawn(wording, 11)
            makers = [p.pattern for p in TRAINING if p.fullmatch(text)]
            assert not makers, f"{text!r} is made by {makers}"


def test_every_held_out_word_is_a_training_word() -> None:
    known = {word for name in words.NAMES for word in name.lower().split()}
    lists = (words.KIDS, words.PEOPLE, words.PLACES, words.DAYS)
    known |= {word.lower() for group in lists for word in group}
    known |= {word for pair in (*words.ITEMS, *words.BOXES) for word in pair}
    frames = [f for frames in STORIES.sections.values() for f in frames]
    frames += [wording for chain in CHAINS for wording in chain.wordings]
    for frame in frames:
        known |= words_of(frame)
    held_out = [f for frames in HELDOUT_FORMS.sections.values() for f in frames]
    held_out += [wording for chain in HELDOUT_SKELETONS for wording in chain.wordings]
    unknown = set().union(*(words_of(frame) for frame in held_out)) - known
    assert not unknown


@pytest.mark.parametrize("chain", CHAINS + HELDOUT_SKELETONS, ids=lambda chain: chain.source)
def test_the_numbers_of_a_problem_are_the_operands_of_its_steps(chain: Chain) -> None:
    for seed in range(20):
        made = chain_problem(chain, random.Random(seed))
        shown = set(re.findall(r"\d+", made.question))
        results: set[str] = set()
        for step in made.steps:
            for operand in (step.left, step.right):
                literal = operand in (2, 3, 12)  # half, twice, average, dozen
                assert str(operand) in shown | results or literal, (seed, made.question, made.steps)
            results.add(str(step.result))


@given(seed=st.integers(0, 2**32))
def test_worked_solutions_are_right_and_in_the_taught_range(seed: int) -> None:
    made = problem(random.Random(seed))
    for step in made.steps:
        value = {
            "+": step.left + step.right,
            "-": step.left - step.right,
            "*": step.left * step.right,
            "/": step.left / step.right,
        }[step.op]
        assert value == step.result, seed
        assert 1 <= step.result <= 1999, seed
    assert made.response == f"Answer: {made.steps[-1].result}"


@given(seed=st.integers(0, 2**32))
def test_a_story_of_the_forms_suite_holds_exactly_one_held_out_sentence(seed: int) -> None:
    made = story(random.Random(seed), HELDOUT_FORMS)
    unseen = [
        re.compile(re.sub(r"^\\s\*", "", pattern(HELDOUT_FORMS, f).pattern), re.IGNORECASE)
        for frames in HELDOUT_FORMS.sections.values()
        for f in frames
    ]
    hits = list(islice((p for p in unseen if p.search(made.question)), 3))
    assert len(hits) == 1, (seed, made.question)
