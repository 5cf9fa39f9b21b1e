"""Plans on the wire: what a chunk carries, and what only the final one does."""

from __future__ import annotations

from k3.v1 import common_pb2, prefill_pb2
from prefill_svc import wire
from prefill_svc.core.scheduler import Chunk, Plan


def chunk(start: int, length: int, *, is_final: bool) -> Chunk:
    return Chunk(
        key=9,
        epoch=1,
        start=start,
        length=length,
        is_final=is_final,
        pages=(4, 2),
        read_slot=3 if start else -1,
        write_slot=3,
    )


def start(**fields: object) -> prefill_pb2.Start:
    sampling = common_pb2.SamplingParams(temperature=0.5, repetition_penalty=1.0, seed=7)
    values = {"token_ids": range(10, 17), "sampling": sampling, **fields}
    return prefill_pb2.Start(**values)  # type: ignore[arg-type]


def rows(opening: prefill_pb2.Start, *chunks: Chunk):
    return wire.step_plan(Plan(5, chunks), {9: opening}).chunks


def test_a_middle_chunk_carries_tokens_and_memory_only() -> None:
    (row,) = rows(start(), chunk(0, 4, is_final=False))
    assert list(row.token_ids) == [10, 11, 12, 13]
    assert (row.start, list(row.pages), row.read_slot, row.write_slot) == (0, [4, 2], -1, 3)
    assert not row.HasField("sampling")
    assert not row.HasField("next_token_id")


def test_the_final_chunk_says_how_the_token_is_drawn() -> None:
    opening = start(output_prefix_len=2, logprobs=common_pb2.LogprobParams(enabled=True, top=3))
    (row,) = rows(opening, chunk(4, 3, is_final=True))
    assert list(row.token_ids) == [14, 15, 16]
    assert row.sampling.seed == 7
    assert row.logprobs.top == 3
    assert row.output_prefix_len == 2
    assert not row.prompt_ids, "no penalty needs them"


def test_prompt_ids_travel_when_a_penalty_counts_them() -> None:
    sampling = common_pb2.SamplingParams(presence_penalty=0.5, repetition_penalty=1.0)
    (row,) = rows(start(sampling=sampling), chunk(4, 3, is_final=True))
    assert list(row.prompt_ids) == list(range(10, 17))


def test_prompt_logprobs_need_the_token_after_the_chunk() -> None:
    wanted = common_pb2.LogprobParams(enabled=True, top=1)
    first, last = rows(
        start(prompt_logprobs=wanted), chunk(0, 4, is_final=False), chunk(4, 3, is_final=True)
    )
    assert first.next_token_id == 14
    assert first.prompt_logprobs.top == 1
    assert not last.HasField("next_token_id")


def test_the_first_stretch_begins_with_a_token_without_logprob() -> None:
    tokens = [common_pb2.Token(id=11, logprob=-1.0)]
    first = wire.prompt_logprobs(chunk(0, 4, is_final=False), start(), tokens)
    assert (first.start, [t.id for t in first.tokens]) == (0, [10, 11])
    assert not first.tokens[0].HasField("logprob")
    later = wire.prompt_logprobs(chunk(4, 3, is_final=True), start(), tokens)
    assert (later.start, len(later.tokens)) == (5, 1)
