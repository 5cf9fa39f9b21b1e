"""Incremental UTF-8: bytes of tokens in, text that can no longer change out.

Law: for every chunking the concatenation of what `push` and `flush` return equals
`b"".join(chunks).decode("utf-8", "replace")`. At most three bytes are held back.
"""

from __future__ import annotations

import codecs


class Utf8Stream:
    """Decodes a byte stream piece by piece; invalid bytes become U+FFFD once nothing can complete them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """Text completed by these bytes."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is held back, replaced; afterwards the stream starts anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    @property
    def is_holding(self) -> bool:
        """Whether bytes of an unfinished code point are held back."""
        return self._decoder.getstate()[0] != b""
