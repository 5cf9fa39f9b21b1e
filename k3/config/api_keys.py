"""Files of API keys: one a line, empty lines and lines after # left out. The configuration holds paths only."""

from __future__ import annotations

from pathlib import Path

MIN_KEY_CHARS = 16
ALLOWED = frozenset(map(chr, range(0x21, 0x7F)))  # what every client can send in a header


def read_keys(path: str) -> tuple[str, ...]:
    """Keys of a file; of no path none. Raises OSError, ValueError (naming the line, never the key)."""
    if not path:
        return ()
    keys: list[str] = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < MIN_KEY_CHARS or not ALLOWED.issuperset(key):
            raise ValueError(
                f"line {number}: a key has at least {MIN_KEY_CHARS} characters, ASCII and no blanks"
            )
        keys.append(key)
    if not keys:
        raise ValueError("there is no key in it")
    return tuple(keys)


def unusable_keys(path: str) -> str | None:
    """What is wrong with a file of keys."""
    try:
        read_keys(path)
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        return f"{path}: {error}"
    return None
