"""KVH1: the chain of page hashes that names what a page of a prompt holds.

A page's hash covers its tokens and, through its parent, everything before it; the root covers what else decides the
cached bytes: namespace (model, dtypes, drafter), page size, adapter and salt. Two prompts share a page exactly when the
hashes are equal. Router, prefill and decode use this one function; hashes are 16 bytes, lower-case hexadecimal in text.
Only whole pages have a hash. Pure: no torch, no network.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HASH_BYTES = 16
ROOT_PERSON = b"kvh1-root"
PAGE_PERSON = b"kvh1-block"


@dataclass(frozen=True, order=True, slots=True)
class Extra:
    """Something beside the tokens that decides what is cached, such as an image. offset: position of its token."""

    offset: int
    kind: str
    value: str


def namespace(layout_fingerprint: str, draft_fingerprint: str) -> str:
    """What the caches of an instance consist of: model, dtypes, page size; drafter and taps. Sharding is not in it."""
    return f"{layout_fingerprint}|draft:{draft_fingerprint}"


def root(namespace: str, page_tokens: int, *, adapter: str = "", salt: bytes = b"") -> bytes:
    """Parent of every first page. salt: names who shares; empty = everybody."""
    parts = (_enc(namespace.encode()), _u32(page_tokens), _enc(adapter.encode()), _enc(salt))
    return _digest(ROOT_PERSON, b"".join(parts))


def page_hashes(
    parent: bytes, token_ids: Sequence[int], page_tokens: int, extras: Iterable[Extra] = ()
) -> tuple[bytes, ...]:
    """Hash of every whole page, in order; parent: the root, or the hash of the page before the first token."""
    by_page: dict[int, list[Extra]] = {}
    for extra in sorted(extras):
        by_page.setdefault(extra.offset // page_tokens, []).append(extra)
    pack = struct.Struct(f"<{page_tokens + 1}I").pack
    hashes: list[bytes] = []
    for page in range(len(token_ids) // page_tokens):
        first = page * page_tokens
        own = by_page.get(page, [])
        parts = [parent, pack(page_tokens, *token_ids[first : first + page_tokens]), _u32(len(own))]
        for extra in own:
            parts += [_u32(extra.offset - first), _enc(extra.kind.encode())]
            parts.append(_enc(extra.value.encode()))
        parent = _digest(PAGE_PERSON, b"".join(parts))
        hashes.append(parent)
    return tuple(hashes)


def _digest(person: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES, person=person).digest()


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _enc(data: bytes) -> bytes:
    """Length first, so that no two lists of parts read the same."""
    return _u32(len(data)) + data
