"""When an answer is right. Pure, on text; the one place with these rules, for REST and for training alike.

answer_line   the last line `Answer: ...` of the response equals the gold answer
response      the response text equals the gold answer
raw           everything generated, tags and end of message written out, equals the gold answer
none          nothing to compare; such an item is not scored
"""

from __future__ import annotations

CHECKS = ("answer_line", "response", "raw", "none")
OPENING, CLOSING = "<|open|>response<|sep|>", "<|close|>response<|sep|>"


def response_of(raw: str) -> str:
    """The response channel of an answer with its tags written out; empty without one."""
    _, opening, rest = raw.partition(OPENING)
    return rest.partition(CLOSING)[0] if opening else ""


def is_right(check: str, gold: str | None, *, response: str, raw: str = "") -> bool | None:
    """Whether an answer is right; None when the check is `none`. ValueError for an unknown check.

    raw: needed by check `raw` only.
    """
    match check:
        case "answer_line":
            lines = [line for line in response.splitlines() if line.startswith("Answer: ")]
            return bool(lines) and lines[-1] == gold
        case "response":
            return response == gold
        case "raw":
            return raw == gold
        case "none":
            return None
        case _:
            raise ValueError(f"unknown check {check!r}; expected one of {', '.join(CHECKS)}")
