"""How many drafts of each row a step checks: prefixes by confidence, weighed against what a step costs here. Pure.

A draft is worth checking while the tokens a step is expected to emit, times the steps per second at its size, still
grow. Drafts of all rows are taken in order of the probability that they and those before them are accepted; the first
one that does not pay ends the search. Stopping there is also what keeps sampled drafts lossless: whether draft i is
checked depends on nothing that was drawn after it. Confidences and costs are measured (`k3/calibration.py`), never
assumed. Golden: dspark/schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from k3.calibration import StepRates


def schedule(
    confidence: Sequence[Sequence[float]], rates: StepRates, *, stop_early: bool = True
) -> list[int]:
    """Drafts to check of each row, a prefix of each, where a step costs what its tokens cost.

    confidence: per row, for each draft the calibrated probability that it is accepted if those before it are.
    stop_early: end at the first draft that does not pay; else take the best of all prefixes of the order, which is
    lossless for greedy drafts only.
    """
    reach: list[list[float]] = [list(accumulate(row, mul)) for row in confidence]
    return _search(reach, len(confidence), 1, rates, stop_early=stop_early)


def width(confidence: Sequence[Sequence[float]], n_rows: int, rates: StepRates) -> int:
    """Drafts to check of every row where all groups of a step are equally wide, so that one more costs `n_rows` tokens.

    confidence: as above, of the rows that have drafts. All drafts of one position are taken together.
    """
    reach = (accumulate(row, mul) for row in confidence)
    columns: list[float] = [sum(column) for column in zip(*reach, strict=True)]
    [found] = _search([columns], n_rows, n_rows, rates, stop_early=True)
    return found


def _search(
    reach: Sequence[Sequence[float]], n_rows: int, cost: int, rates: StepRates, *, stop_early: bool
) -> list[int]:
    """Items to take of each sequence, in falling order; an item brings its value in tokens and costs `cost` tokens."""
    lengths, taken = [0] * len(reach), [0] * len(reach)
    if not n_rows:
        return lengths
    order = sorted((-p, r, i) for r, row in enumerate(reach) for i, p in enumerate(row))
    expected = float(n_rows)
    best = expected * rates.at(n_rows)
    for n, (negative, r, _i) in enumerate(order, 1):
        expected -= negative
        taken[r] += 1
        gain = expected * rates.at(n_rows + n * cost)
        if gain > best:
            best, lengths = gain, list(taken)
        elif stop_early:
            break
    return lengths
