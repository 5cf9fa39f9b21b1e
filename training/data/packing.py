"""Packed batches: documents back to back in one flat stream of fixed length, none truncated.

`batch(step)` is a pure function of (seed, step), so the number of worker processes changes nothing. Workers send raw
bytes over pipes; `Feed` hands batches out in step order.
"""

import multiprocessing as mp
import random
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training import tokenizer
from training.chat import ChatCodec
from training.data.mixture import Document, Maker, Mixture


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [N] int32, classes [N] uint8 (0 untrained, 1 prompt, 2 answer), starts [n_docs + 1] int32."""

    ids: NDArray[np.int32]
    classes: NDArray[np.uint8]
    starts: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run feeds: tokens per step, number of steps, seed, mixture, tokenizer file."""

    n_tokens: int
    n_steps: int
    seed: int
    mixture: Mixture
    tokenizer: Path


def fill(documents: list[Document], n_tokens: int, pad: int) -> Batch:
    """Concatenate documents and pad the rest as one untrained document."""
    ids = np.full(n_tokens, pad, np.int32)
    classes = np.zeros(n_tokens, np.uint8)
    starts = [0]
    for document in documents:
        end = starts[-1] + len(document.ids)
        ids[starts[-1] : end] = document.ids
        classes[starts[-1] : end] = np.frombuffer(bytes(document.classes), np.uint8)
        starts.append(end)
    if starts[-1] < n_tokens:
        starts.append(n_tokens)
    return Batch(ids, classes, np.array(starts, np.int32))


def make_batch(maker: Maker, plan: Plan, step: int) -> Batch:
    """The batch of one step: draw until full; a document that does not fit is dropped, eight times at most."""
    rng = random.Random(f"{plan.seed}:{step}")
    room, misses = plan.n_tokens, 0
    documents: list[Document] = []
    while misses < 8:
        document = maker.document(rng, (step + 1) / plan.n_steps)
        if len(document.ids) <= room:
            documents.append(document)
            room -= len(document.ids)
        else:
            misses += 1
    return fill(documents, plan.n_tokens, maker.codec.special.pad)


def _work(plan: Plan, first: int, stride: int, start: int, pipe: Connection) -> None:
    maker = Maker(ChatCodec(tokenizer.load(plan.tokenizer)), plan.mixture)
    for step in range(start + first, plan.n_steps, stride):
        batch = make_batch(maker, plan, step)
        pipe.send_bytes(batch.ids.tobytes())
        pipe.send_bytes(batch.classes.tobytes())
        pipe.send_bytes(batch.starts.tobytes())
    pipe.close()


class Feed:
    """Batches of the steps from `start` on, made by `n_workers` processes; use as a context manager."""

    def __init__(self, plan: Plan, n_workers: int, start: int = 0) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[mp.process.BaseProcess] = []
        context = mp.get_context("spawn")
        for first in range(n_workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(plan, first, n_workers, start, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._next = 0

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join(5)

    def take(self) -> Batch:
        """The next batch; raises EOFError when its worker died, TimeoutError after two minutes."""
        pipe = self._pipes[self._next % len(self._pipes)]
        self._next += 1
        if not pipe.poll(120):
            raise TimeoutError(
                "no batch from a data worker within 120 s; look for its traceback above"
            )
        ids = np.frombuffer(pipe.recv_bytes(), np.int32)
        classes = np.frombuffer(pipe.recv_bytes(), np.uint8)
        return Batch(ids, classes, np.frombuffer(pipe.recv_bytes(), np.int32))
