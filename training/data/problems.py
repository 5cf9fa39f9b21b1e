"""Word problems: inventory stories from the grammar, operation chains, bare calculations, and their held-out twins.

A problem is a question with its solved steps. The held-out sets come from heldout_*.txt: `forms` puts one
unseen event sentence into a story of the grammar, `skeletons` are whole unseen problems.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from training.data.grammar import Grammar, Sequence, parse, tidy
from training.data.programs import Program, Step, amount, apply, total
from training.data.words import scene

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the steps that solve it; `template` names its origin."""

    question: str
    steps: tuple[Step, ...]
    template: str

    @property
    def answer(self) -> int:
        """The last result."""
        return self.steps[-1].result

    @property
    def think(self) -> str:
        """The worked solution, one line per step."""
        return "".join(
            f"Step {i}: {s.left} {s.op} {s.right} = {s.result}\n"
            for i, s in enumerate(self.steps, 1)
        )

    @property
    def response(self) -> str:
        """The final answer line."""
        return f"Answer: {self.answer}"


@dataclass(frozen=True, slots=True)
class Chain:
    """A program with its wordings."""

    source: str
    program: Program
    wordings: tuple[Sequence, ...]


def read_chains(path: Path) -> tuple[Chain, ...]:
    """Read `= program` blocks followed by one wording a line."""
    blocks: list[tuple[str, list[Sequence]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("= "):
            blocks.append((line[2:].strip(), []))
        elif line and not line.startswith("#"):
            blocks[-1][1].append(parse(line))
    return tuple(Chain(source, Program.parse(source), tuple(w)) for source, w in blocks)


STORIES = Grammar.read(HERE / "stories.txt")
CHAINS = read_chains(HERE / "chains.txt")
HELDOUT_FORMS = Grammar.read(HERE / "heldout_forms.txt")
HELDOUT_SKELETONS = read_chains(HERE / "heldout_skeletons.txt")
_EMPTY = Grammar({})
_EVENTS = (
    ("gain", 30), ("loss", 34), ("gain_groups", 9), ("loss_groups", 11),
    ("times2", 3), ("times", 3), ("half", 4), ("share", 6),
)  # fmt: skip
_EVENT_NAMES = [name for name, _ in _EVENTS]
_EVENT_WEIGHTS = [weight for _, weight in _EVENTS]
_OPENINGS = ("open_n", "open_kw", "open_ab", "open_more", "open_fewer", "open_times")
_ENDINGS = ("end_price", "end_pack", "end_need", "end_over", "end_both")


def chain_problem(chain: Chain, rng: random.Random) -> Problem:
    """A problem of one chain, wording drawn at random."""
    numbers, steps = chain.program.sample(rng)
    at = int(rng.random() * len(chain.wordings))
    text = _EMPTY.fill(chain.wordings[at], {**scene(rng), **numbers}, rng)
    return Problem(text, tuple(steps), f"{chain.source} ({at})")


def calculation(rng: random.Random) -> Problem:
    """A bare calculation of one or two steps."""
    form = rng.choice(
        ("a+b", "a-b", "k*w", "n/k", "a+b; #1+c", "a+b; #1-c", "k*w; #1+a", "k*w; #1-a")
    )
    numbers, steps = Program.parse(form).sample(rng)
    expression = form.split(";")[0]
    if ";" in form:
        expression += form.split("#1")[1]
    text = " ".join(str(numbers.get(char, char)) for char in expression)
    frames = ("What is {}?", "Calculate {}.", "How much is {}?", "Find {}.", "{} = ?")
    return Problem(rng.choice(frames).format(text), tuple(steps), "calculation")


class _Story:
    """A story under construction: sentences so far, steps so far, the current count of items."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.scene = scene(rng)
        self.sentences: list[str] = []
        self.steps: list[Step] = []
        self.count = 0

    def say(self, grammar: Grammar, section: str, **numbers: int) -> None:
        self.sentences.append(grammar.draw(section, {**self.scene, **numbers}, self.rng))

    def step(self, left: int, op: str, right: int) -> bool:
        solved = apply(left, op, right)
        if solved is None:
            return False
        self.steps.append(solved)
        self.count = solved.result
        return True

    def open(self) -> None:
        rng = self.rng
        section = rng.choices(_OPENINGS, (62, 14, 8, 6, 5, 5))[0]
        a, b, k, w = amount(rng), amount(rng), rng.randint(2, 9), rng.randint(2, 60)
        n = total(rng)
        match section:
            case "open_n":
                self.count = n
            case "open_kw" | "open_times":
                self.step(k, "*", w)
            case "open_ab" | "open_more":
                self.step(a, "+", b)
            case _:
                a = rng.randint(1, n - 1)
                self.step(n, "-", a)
        self.say(STORIES, section, a=a, b=b, k=k, w=w, n=n)

    def event(self, heldout: Grammar | None) -> bool:
        """Add one event; False when the drawn one does not fit the current count."""
        rng = self.rng
        unseen = heldout is not None
        kind = (
            rng.choice(("gain", "loss")) if unseen else rng.choices(_EVENT_NAMES, _EVENT_WEIGHTS)[0]
        )
        x, k, w = self.count, rng.randint(2, 9), rng.randint(2, 40)
        a = amount(rng)
        match kind:
            case "gain":
                ok = self.step(x, "+", a)
            case "loss":
                if x < 3:
                    return False
                a = rng.randint(2, x - 1) if x < 60 or rng.random() < 0.4 else rng.randint(2, 50)
                ok = self.step(x, "-", a)
            case "gain_groups" | "loss_groups":
                op = "+" if kind == "gain_groups" else "-"
                if (op == "-" and k * w >= x) or x + k * w > 1500:
                    return False
                self.step(k, "*", w)
                ok = self.step(x, op, k * w)
            case "times2":
                ok = self.step(2, "*", x)
            case "times":
                k = rng.randint(2, 5)
                ok = self.step(k, "*", x)
            case "half":
                ok = self.step(x, "/", 2)
            case _:
                divisors = [d for d in range(2, 10) if x % d == 0]
                if not divisors:
                    return False
                k = rng.choice(divisors)
                ok = self.step(x, "/", k)
        if ok:
            self.say(heldout or STORIES, kind, a=a, k=k, w=w)
        return ok

    def close(self) -> None:
        """A plain question, or a closing turn with one more step."""
        rng = self.rng
        ending = rng.choice(_ENDINGS) if rng.random() < 0.25 else "ask"
        x, c, p, k, n = self.count, amount(rng), rng.randint(2, 12), 2, total(rng)
        ok = True
        match ending:
            case "end_price":
                ok = self.step(p, "*", x)
            case "end_pack":
                divisors = [d for d in range(2, 10) if x % d == 0]
                ok = bool(divisors)
                if ok:
                    k = rng.choice(divisors)
                    self.step(x, "/", k)
            case "end_need":
                n = x + rng.randint(1, 200)
                ok = self.step(n, "-", x)
            case "end_over":
                ok = x > 2
                if ok:
                    c = rng.randint(1, x - 1)
                    self.step(x, "-", c)
            case "end_both":
                ok = self.step(x, "+", c)
            case _:
                pass
        self.say(STORIES, ending if ok else "ask", c=c, p=p, k=k, n=n)


def story(rng: random.Random, heldout: Grammar | None = None) -> Problem:
    """An inventory story; with `heldout`, exactly one of its events is a held-out sentence."""
    while True:
        draft = _Story(rng)
        draft.open()
        n_events = rng.choices((0, 1, 2, 3, 4), (4, 26, 32, 26, 12))[0]
        if heldout is not None:
            n_events = max(1, n_events)
        unseen = rng.randrange(n_events) if heldout is not None else -1
        done = 0
        for _ in range(30):
            if done == n_events:
                break
            done += draft.event(heldout if done == unseen else None)
        if done < n_events:
            continue
        draft.close()
        if 1 <= len(draft.steps) <= 6:
            return Problem(tidy(" ".join(draft.sentences)), tuple(draft.steps), "story")


def problem(rng: random.Random) -> Problem:
    """A training problem: 40 % stories, 48 % chains, 12 % calculations."""
    u = rng.random()
    if u < 0.40:
        return story(rng)
    if u < 0.88:
        return chain_problem(CHAINS[int(rng.random() * len(CHAINS))], rng)
    return calculation(rng)
