"""A sender's share of a copy command: which source pieces go to which target pieces of one receiver. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from k3.transfer.agent import Indices
from k3.transfer.peers import Link, Peer
from k3.transfer.plan import owned_pages
from k3.v1 import plan_pb2

PAGE_POOLS = ("latent",)
DRAFT_POOL = "draft"


@dataclass(frozen=True, slots=True)
class Share:
    """One handle's worth of one pool."""

    link: Link
    source: Indices
    target: Indices


def destination_problem(start: plan_pb2.StartTransfer, peer: Peer, page_tokens: int) -> str:
    """What is wrong with a destination, or nothing. Everything in it comes from the network."""
    decode, destination = peer.pair.decode, start.destination
    lists = {one.rank: one.pages for one in destination.rank_pages}
    prompt_pages = -(-start.prompt_len // page_tokens)
    if prompt_pages < 1:
        return f"prompt_len={start.prompt_len}: at least one token expected"
    if destination.state_slot >= decode.n_slots:
        return f"state_slot={destination.state_slot}: the peer has {decode.n_slots}"
    if start.send_draft and destination.draft_slot >= decode.n_slots:
        return f"draft_slot={destination.draft_slot}: the peer has {decode.n_slots}"
    for receiver in peer.links:
        pages = lists.get(receiver, destination.pages)
        _stage, shard = decode.place(receiver)
        n_owned = len(owned_pages(0, prompt_pages, decode.cp, shard % decode.cp))
        if len(pages) < n_owned:
            return f"{len(pages)} pages for rank {receiver}: the prompt needs {n_owned} there"
        if pages and max(pages) >= decode.n_pages:
            return f"page {max(pages)} for rank {receiver}: the peer has {decode.n_pages}"
    return ""


def shares(
    peer: Peer,
    sender: int,
    receiver: int,
    command: plan_pb2.CopyPages,
    target_pages: Sequence[int],
    state_slot: int,
    max_bytes: int,
) -> Iterator[Share]:
    """Pages first, then, with `last`, the state; no share is bigger than `max_bytes`, or than one piece.

    target_pages: the receiver's own pages of the whole prompt. state_slot: the receiver's.
    """
    for link in peer.links[receiver]:
        rows = link.rows
        if rows.pool == DRAFT_POOL:
            continue
        if rows.pool in PAGE_POOLS:
            prompt = peer.pair.pages(sender, receiver, command.first_page, len(command.pages))
            pages = np.asarray(prompt, np.int32)
            source = np.asarray(command.pages, np.int32)[pages - np.int32(command.first_page)]
            own = pages // np.int32(peer.pair.decode.cp)
            target = np.asarray(target_pages, np.int32)[own]
            order = np.argsort(source, kind="stable")  # dense runs merge into one descriptor
            source, target = source[order], target[order]
        elif command.last:
            row = np.arange(len(rows.source_offsets), dtype=np.int32)
            source_slot = command.state_slot * rows.source_columns
            source = row * np.int32(rows.source_units) + np.int32(source_slot)
            target = row * np.int32(rows.target_units) + np.int32(state_slot * rows.target_columns)
        else:
            continue
        yield from _cut(link, source, target, max_bytes)


def draft_shares(
    peer: Peer,
    receiver: int,
    command: plan_pb2.CopyPages,
    start: plan_pb2.StartTransfer,
    page_tokens: int,
    max_bytes: int,
) -> Iterator[Share]:
    """Draft rows of the command's pages that decode's window reaches; page b goes to place b % Q of the ring."""
    if not start.send_draft:
        return
    wanted = peer.pair.draft_pages(start.prompt_len, page_tokens)
    first = max(command.first_page, wanted.start)
    prompt = np.arange(first, command.first_page + len(command.pages), dtype=np.int32)
    for link in peer.links.get(receiver, ()):
        if link.rows.pool == DRAFT_POOL and len(prompt):
            places = np.int32(link.rows.target_columns)
            source = np.asarray(command.pages, np.int32)[prompt - np.int32(command.first_page)]
            target = np.int32(start.destination.draft_slot) * places + prompt % places
            order = np.argsort(source, kind="stable")
            yield from _cut(link, source[order], target[order], max_bytes)


def _cut(link: Link, source: Indices, target: Indices, max_bytes: int) -> Iterator[Share]:
    step = max(1, max_bytes // link.rows.length)
    for at in range(0, len(source), step):
        yield Share(link, source[at : at + step], target[at : at + step])
