"""Small checks of the files about to be committed: one newline at the end, no blanks at line ends, no large file.

Run as `python .ci/text.py FILE...`; prints every finding and exits with 1 when there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

LARGEST = 1 << 20
WEIGHTS = (".safetensors", ".tiktoken", ".model")  # model folders hold larger files, up to 32 MiB
LARGEST_WEIGHTS = 32 << 20


def findings(path: Path) -> list[str]:
    """What is wrong with one file."""
    limit = LARGEST_WEIGHTS if path.suffix in WEIGHTS else LARGEST
    size = path.stat().st_size
    if size > limit:
        return [f"{path}: {size} bytes, at most {limit}"]
    data = path.read_bytes()
    if b"\0" in data[:8192] or not data:
        return []
    out: list[str] = []
    if not data.endswith(b"\n") or data.endswith(b"\n\n"):
        out.append(f"{path}: must end with exactly one newline")
    for number, line in enumerate(data.split(b"\n"), 1):
        if line != line.rstrip() and path.suffix != ".md":
            out.append(f"{path}:{number}: blanks at the end of the line")
    return out


if __name__ == "__main__":
    found = [text for name in sys.argv[1:] if Path(name).is_file() for text in findings(Path(name))]
    sys.stdout.write("".join(f"{text}\n" for text in found))
    sys.exit(1 if found else 0)
