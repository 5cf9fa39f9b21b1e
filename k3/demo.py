"""What `k3-local --ask` and `--demo` show: answers as they come with their figures, and what drafts were worth.

The comparison asks the same question of a second cluster that is the same but for its drafts: the first question after
a start each time, on the same machine, minutes apart at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from k3.ask import Answer, ask
from k3.bench.suites import read
from k3.errors import RequestAborted

QUESTION = (
    "Carlos buys 5 cartons with 17 kites in each. He gives 6 kites to each of 3 boys. "
    "How many kites does Carlos have left?"
)
RECALL = "passkey_4k"  # the suite whose first item is asked: a fact in 4,000 tokens of other text
SHOWN_CHARS = 300

Say = Callable[[str], None]
ShouldStop = Callable[[], bool]


def demo_questions() -> tuple[str, ...]:
    """A word problem and a fact to recall."""
    return QUESTION, read(RECALL, 1)[0].turns[0]["content"]


def curl_line(url: str) -> str:
    """A line to paste."""
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def show_answer(url: str, question: str, say: Say, should_stop: ShouldStop) -> Answer:
    """Ask, show the answer as it comes and its figures. `say` prints as it is. RequestAborted when asked to stop."""
    say(f"\n> {shortened(question)}\n\n")
    in_reasoning = False

    def show(piece: str, is_reasoning: bool) -> None:
        nonlocal in_reasoning
        if should_stop():
            say("\n")
            raise RequestAborted("stopped while the answer was coming")
        if in_reasoning and not is_reasoning:
            say("\n---\n")
        in_reasoning = is_reasoning
        say(piece)

    answer = ask(url, question, show)
    say(f"\n\n{figures(answer)}\n")
    return answer


def figures(a: Answer) -> str:
    """One line about an answer."""
    drafts = "" if a.tokens_per_step is None else f" | {a.tokens_per_step:.2f} tokens a step"
    return (
        f"TTFT {a.ttft_s * 1e3:.0f} ms | ITL {a.itl_s * 1e3:.1f} ms | {a.tokens_per_s:.1f} tokens/s{drafts}"
        f" | {a.prompt_tokens} tokens in, {a.completion_tokens} out | finish {a.finish_reason}"
    )


def comparison(drafted: Answer, plain: Answer) -> str:
    """The first question with drafts and without, as a small table."""
    lines = ["the first question            ITL      tokens a step"]
    for name, a in (("without drafts", plain), ("with drafts", drafted)):
        length = 1.0 if a.tokens_per_step is None else a.tokens_per_step
        lines.append(f"  {name:<20} {a.itl_s * 1e3:9.1f} ms {length:12.2f}")
    is_equal = (drafted.reasoning, drafted.text) == (plain.reasoning, plain.text)
    gain = plain.itl_s / drafted.itl_s
    lines.append(f"  speed-up {gain:.2f}, answers {'equal' if is_equal else 'DIFFER'}")
    return "\n".join(lines)


def shortened(question: str) -> str:
    """A question to print: of a long one its first and its last line."""
    lines = question.splitlines()
    if len(question) <= SHOWN_CHARS or len(lines) < 3:
        return question
    return f"{lines[0]}\n  [{len(lines) - 2} more lines, {len(question)} characters in all]\n  {lines[-1]}"
