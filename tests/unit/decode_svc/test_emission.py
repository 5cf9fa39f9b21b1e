"""Which tokens of a step are kept, and why a generation ends."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from decode_svc.emission import Kept, keep, usage
from k3.types import FinishReason, StopParams, TokenEvent, Usage

EOS, STOP, BOTH = 7, 8, 9
PARAMS = StopParams(max_tokens=5, eos_token_ids=(EOS, BOTH), stop_token_ids=(STOP, BOTH))


def events(*ids: int) -> tuple[TokenEvent, ...]:
    return tuple(TokenEvent(i) for i in ids)


@pytest.mark.parametrize(
    ("params", "n_before", "ids", "kept"),
    [
        (PARAMS, 0, (1,), Kept(events(1))),
        (PARAMS, 0, (EOS,), Kept(events(EOS), FinishReason.STOP)),
        (PARAMS, 1, (1, STOP, 2), Kept(events(1, STOP), FinishReason.STOP, STOP)),
        (PARAMS, 0, (BOTH,), Kept(events(BOTH), FinishReason.STOP, BOTH)),
        (PARAMS, 3, (1, 2, 3), Kept(events(1, 2), FinishReason.LENGTH)),
        (PARAMS, 4, (EOS, 1), Kept(events(EOS), FinishReason.STOP)),
        (PARAMS, 4, (1, EOS), Kept(events(1), FinishReason.LENGTH)),
        (StopParams(9, (EOS,), (STOP,), ignore_eos=True), 0, (EOS, 1), Kept(events(EOS, 1))),
        (
            StopParams(9, (EOS,), (STOP,), ignore_eos=True),
            0,
            (EOS, STOP),
            Kept(events(EOS, STOP), FinishReason.STOP, STOP),
        ),
        (StopParams(1), 0, (1,), Kept(events(1), FinishReason.LENGTH)),
    ],
)
def test_stop_conditions(
    params: StopParams, n_before: int, ids: tuple[int, ...], kept: Kept
) -> None:
    assert keep(params, n_before, events(*ids)) == kept


@pytest.mark.dspark
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 12), st.data())
def test_any_grouping_keeps_the_same_tokens(
    ids: list[int], limit: int, data: st.DataObject
) -> None:
    """Emitting one token per step or many at once ends at the same place for the same reason."""
    params = StopParams(limit, (EOS,), (STOP,))

    def run(next_size: object) -> tuple[list[int], FinishReason | None]:
        out, at = list[int](), 0
        while at < len(ids):
            size = next_size() if callable(next_size) else 1
            kept = keep(params, len(out), events(*ids[at : at + size]))
            out += [t.id for t in kept.tokens]
            at += size
            if kept.finish is not None:
                return out, kept.finish
        return out, None

    assert run(lambda: data.draw(st.integers(1, 8))) == run(lambda: 1)


def test_usage_counts_earlier_output_as_output() -> None:
    assert usage(10, 0, 4, 6) == Usage(10, 4, 6)
    assert usage(10, 3, 4, 6) == Usage(7, 7, 6)
    assert usage(10, 3, 4, 8) == Usage(7, 7, 7)  # no more of the prompt is cached than there is
