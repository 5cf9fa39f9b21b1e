"""Writes senders.json.xz: who sends what to whom, found by dealing cards instead of by formulas.

Run as `python make.py` in this folder. Standard library only; nothing of the code under test is imported. Every token,
page, head and layer is a card that is dealt out one by one the way the rules say it in words:

- tokens fill pages; pages go to the context ranks in turn; every tensor parallel rank of that context rank gets a copy;
- heads are dealt in equal consecutive runs, to prefill ranks on one side, to decode ranks on the other;
- a rank of a stage holds things of the layers of its stage only;
- where prefill has fewer ranks than decode, receivers sit down at the senders in turn, and everything a receiver needs
  that all senders hold comes from its sender; where it has more, senders form teams, in turn, one per receiver, and the
  members of a team take the receiver's pages in turn;
- draft rows leave the last prefill stage for the last decode stage: copied whole by the receiver's sender (the first of
  its team), or by heads like states.
"""

from __future__ import annotations

import itertools
import json
import lzma
from pathlib import Path

HEADS, PAGE_TOKENS = 48, 4
PROMPTS = (1, 4, 5, 23, 49)
# Layers by letter (k = KDA, m = MLA) and the first layers of stages, for one, two and three stages.
MODELS = {
    "kkkmkkkmm": ((0, 9), (0, 4, 9), (0, 5, 9), (0, 3, 7, 9)),
    "kkmm": ((0, 4), (0, 2, 4), (0, 1, 3, 4)),
}
PREFILL_TP = (1, 2, 3, 4, 6, 8)
DECODE = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 4))


def stages(n_layers: int, bounds: tuple[int, ...]) -> list[set[int]]:
    """Layers of each stage."""
    found: list[set[int]] = []
    for layer in range(n_layers):
        if layer in bounds:
            found.append(set())
        found[-1].add(layer)
    return found


def runs(n_ranks: int) -> list[set[int]]:
    """Heads of each rank of a stage: consecutive, equally many."""
    hands: list[set[int]] = [set() for _ in range(n_ranks)]
    rank = 0
    for head in range(HEADS):
        if len(hands[rank]) == HEADS / n_ranks:
            rank += 1
        hands[rank].add(head)
    return hands


def pages_of(prompt: int, tp: int, cp: int) -> list[list[int]]:
    """Pages of the prompt that each rank of a decode stage holds, in order; ranks count through cp first."""
    hands: list[list[int]] = [[] for _ in range(tp * cp)]
    turn = itertools.cycle(range(cp))
    page, room, context = -1, 0, 0
    for _token in range(prompt):
        if room == 0:
            page, room, context = page + 1, PAGE_TOKENS, next(turn)
            for tensor in range(tp):
                rank = [(t, c) for t in range(tp) for c in range(cp)].index((tensor, context))
                hands[rank].append(page)
        room -= 1
    return hands


def teams(n_senders: int, n_receivers: int) -> list[list[int]]:
    """Senders that share the work of each receiver of a stage."""
    if n_senders <= n_receivers:
        turn = itertools.cycle(range(n_senders))
        return [[next(turn)] for _ in range(n_receivers)]
    found: list[list[int]] = [[] for _ in range(n_receivers)]
    for sender, team in zip(range(n_senders), itertools.cycle(found), strict=False):
        team.append(sender)
    return found


def case(kinds: str, p_bounds: tuple, tp: int, d_bounds: tuple, dtp: int, dcp: int) -> dict:
    """One pair of instances under every prompt length."""
    n_receivers = dtp * dcp
    senders = list(itertools.product(stages(len(kinds), p_bounds), range(tp)))
    receivers = list(itertools.product(stages(len(kinds), d_bounds), range(n_receivers)))
    last_sender, last_receiver = senders[-1][0], receivers[-1][0]
    give, take, team = runs(tp), runs(n_receivers), teams(tp, n_receivers)
    states, copies, shares = [], [], []
    for i, (held, t) in enumerate(senders):
        for j, (wanted, d) in enumerate(receivers):
            both = held & wanted
            if any(kinds[layer] == "k" for layer in both) and give[t] & take[d]:
                states.append([i, j])
            if held is last_sender and wanted is last_receiver:
                if team[d][0] == t:
                    copies.append([i, j])
                if give[t] & take[d]:
                    shares.append([i, j])
    prompts = []
    for prompt in PROMPTS:
        hands = pages_of(prompt, dtp, dcp)
        sent: dict[tuple[int, int], list[int]] = {}
        for i, (held, t) in enumerate(senders):
            for j, (wanted, d) in enumerate(receivers):
                if not any(kinds[layer] == "m" for layer in held & wanted):
                    continue
                for page, sender in zip(hands[d], itertools.cycle(team[d]), strict=False):
                    if sender == t:
                        sent.setdefault((i, j), []).append(page)
        heard = [
            sorted({i for i, j in sent if j == k} | {i for i, j in states if j == k})
            for k in range(len(receivers))
        ]
        pages = [[i, j, numbers] for (i, j), numbers in sent.items()]
        prompts.append({"prompt_len": prompt, "pages": pages, "senders": heard})
    return {
        "kinds": kinds,
        "prefill": {"pp": len(p_bounds) - 1, "tp": tp, "bounds": p_bounds},
        "decode": {"pp": len(d_bounds) - 1, "tp": dtp, "cp": dcp, "bounds": d_bounds},
        "states": states,
        "draft_copies": copies,
        "draft_heads": shares,
        "prompts": prompts,
    }


def cases() -> list[dict]:
    """Every pair whose larger side is a multiple of the smaller one; decode has one or two stages."""
    found = []
    for kinds, partitions in MODELS.items():
        decodes = [bounds for bounds in partitions if len(bounds) <= 3]
        for p_bounds, tp, d_bounds, (dtp, dcp) in itertools.product(
            partitions, PREFILL_TP, decodes, DECODE
        ):
            small, large = sorted((tp, dtp * dcp))
            if large % small == 0:
                found.append(case(kinds, p_bounds, tp, d_bounds, dtp, dcp))
    return found


def main() -> None:
    """Write the table."""
    table = {"heads": HEADS, "page_tokens": PAGE_TOKENS, "cases": cases()}
    text = json.dumps(table, separators=(",", ":"))
    (Path(__file__).parent / "senders.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    main()
