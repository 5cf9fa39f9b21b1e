"""One verify step on one rank: tables, forward, judgement, new rows, next drafts.

Every step is a verify group: the anchor and k drafts per row (k = 0 without a drafter: the group is the anchor). All
state between steps is the row table. The whole step is one function over buffers that never move, keyed by what cannot
be a buffer, so that a runner may record and replay it; nothing in it waits for the host. `launch` returns at once with
an `Outcome` that is still on the device. Letters: B rows, G group tokens, K drafts, T = B * G, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from k3_kernels import drafts, draws
from torch import Tensor

from decode_svc.ledger import Ledger
from decode_svc.rank.drafting import Drafting
from decode_svc.rank.grammar import Grammar, Masks
from decode_svc.rank.graphs import UNCHECKED, GraphRunner, StepKey
from decode_svc.rank.outcome import Drawn, Outcome
from decode_svc.rank.rows import DUMMY_ROW, RowTable
from decode_svc.rank.tables import GroupBatch, TableBuffers
from k3.acceptance import NAMES, RULES, accept
from k3.device import Device, uploaded
from k3.edits import unpack_mask
from k3.model.batch import StageCaches
from k3.model.k3 import Stage
from k3.parallel.relay import Relay
from k3.sampling import Flavour, Purpose, Recipe, RowSampling, one_hot, pick
from k3.v1 import plan_pb2


class Composition(NamedTuple):
    """Who takes part, and what of that the host needs again in every step."""

    version: int
    rows: tuple[int, ...]
    limits: tuple[int, ...] | None
    flavour: Flavour
    sampling: tuple[RowSampling, ...]


class VerifyStep:
    """Runs steps of one stage; see the module's docstring."""

    def __init__(
        self,
        stage: Stage,
        caches: StageCaches,
        table: RowTable,
        ledger: Ledger,
        runner: GraphRunner,
        device: Device,
        *,
        max_rows: int,
        group: int,
        depth: int,
        drafting: Drafting | None = None,
        acceptance: str = "match",
        relay: Relay | None = None,
    ) -> None:
        """depth: outcomes that may be unread at once. drafting: proposes drafts, where there is a drafter.

        acceptance: `match`, or a rule that weighs drafts (`k3/acceptance.py`), for which the table keeps proposals.
        relay: brings the frame of the stage before, where there is one (`stages.py`).
        """
        if acceptance not in NAMES:
            raise ValueError(f"acceptance={acceptance!r}: expected one of {', '.join(NAMES)}")
        if acceptance != "match" and table.proposal_RKV is None:
            raise ValueError(f"acceptance={acceptance!r} needs a row table that keeps proposals")
        self._rule = RULES.get(acceptance)
        self._stage, self._caches, self._table = stage, caches, table
        assert stage.head is not None, "only the last stage judges"
        self._head, self._shard = stage.head, stage.groups.shard
        slices = self._head.slices if self._shard.size > 1 else None
        self._greedy = drafts.greedy_judge(stage.ops.dense, slices)
        self._draw = draws.draw(stage.ops.dense)
        self._drafting, self._runner, self._device = drafting, runner, device
        self.group = group
        most = runner.bucket(max_rows)
        derive = drafts.derive_tables(stage.ops.dense)
        self._buffers = TableBuffers(table, ledger, stage.place.cp_rank, most, group, derive)
        self._masks = Masks(most, group, table.vocab_size, table.device)
        self._offsets_G = torch.arange(group, device=table.device)
        self._opened = torch.zeros(most, dtype=torch.int64, device=table.device)
        make = partial(torch.zeros, device=table.device)
        sizes = (most, group, table.vocab_size, table.n_confidences)
        self._drawn = Drawn.empty(*sizes, make)
        self._staging = deque(Drawn.empty(*sizes, device.staging) for _ in range(depth))
        self._unread: deque[tuple[Outcome, tuple[Grammar | None, ...]]] = deque()
        self._composition: Composition | None = None
        self._forward_s: float | None = None  # of the newest run of the work itself
        self._relay, self._n_steps = relay, 0

    def warm_up(self, bucket: int) -> None:
        """Run a bucket of dummy rows: no page is written, no request's state is touched."""
        self.launch((DUMMY_ROW,) * bucket, self.group)

    def buffers(self) -> dict[str, Tensor]:
        """Everything outside the model and its caches that a recorded step reads or writes."""
        return {
            **self._table.buffers(),
            **self._buffers.buffers(),
            **self._drawn.buffers(),
            "masks": self._masks.words_BGW,
            "opened": self._opened,
        }

    @torch.inference_mode()
    def open(self, rows: Sequence[int], max_base: int) -> None:
        """Propose the first drafts of rows that were just opened. max_base: upper bound of their bases."""
        if self._drafting is None or not rows:
            return
        bucket = self._runner.bucket(len(rows))
        padded = (*rows, *[DUMMY_ROW] * (bucket - len(rows)))
        draws = self._table.proposal_RKV is not None
        flavour = self._table.flavour(padded) if draws else Flavour(greedy=True)
        max_len = self._runner.bound(max_base)
        key = StepKey(bucket, max_len, self._runner.flavour(flavour), UNCHECKED, proposes=True)
        self.prepare(key)
        self._opened[:bucket].copy_(uploaded(torch.tensor(padded), self._opened.device))
        self._runner.run(key, partial(self._run, key))

    @torch.inference_mode()
    def launch(
        self,
        rows: Sequence[int],
        max_base: int,
        limits: Sequence[int] | None = None,
        *,
        group: int | None = None,
        proposes: bool = True,
    ) -> Outcome:
        """One group for each of `rows` (distinct). max_base: upper bound of every row's base.

        limits: drafts at most in each group; all that a row has by default. group: tokens of every group, the most
        there is room for by default. proposes: whether the rows get drafts for their next group. All ranks launch the
        same steps; every rank takes the same tokens, so rows cannot drift apart.
        """
        self._n_steps += 1
        group = group or self.group
        if limits is None and group < self.group:
            limits = (group - 1,) * len(rows)
        now, is_new = self._compose(tuple(rows), None if limits is None else tuple(limits))
        bucket = self._runner.bucket(len(now.rows))
        max_len = self._runner.bound(max_base + self.group)
        key = StepKey(bucket, max_len, now.flavour, self._runner.width(group), proposes)
        is_new = self.prepare(key) or is_new
        if is_new:
            dummies = bucket - len(now.rows)
            padded = None if now.limits is None else (*now.limits, *[0] * dummies)
            self._buffers.choose((*now.rows, *[DUMMY_ROW] * dummies), padded)
        self._heed_grammars(now)
        started = time.perf_counter()
        self._forward_s = None
        self._runner.run(key, partial(self._run, key))
        launch_s = time.perf_counter() - started
        forward_s = launch_s if self._forward_s is None else self._forward_s
        return self._outcome(now, bucket, proposes, forward_s)

    @torch.inference_mode()
    def prepare(self, key: StepKey) -> bool:
        """Have the runner record a step, where it records; whether it just did. No request's state is touched."""
        if self._runner.is_ready(key):
            return False
        # a recorder runs the work more than once
        if key.group == UNCHECKED:
            self._opened[: key.n_rows].fill_(DUMMY_ROW)
        else:
            self._composition = None
            self._buffers.choose((DUMMY_ROW,) * key.n_rows)
        self._runner.capture(key, partial(self._run, key), self.buffers)
        return True

    def _compose(
        self, rows: tuple[int, ...], limits: tuple[int, ...] | None
    ) -> tuple[Composition, bool]:
        """The composition of a step and whether it is another than before; free while it is the same."""
        last = self._composition
        if last is not None and last[:3] == (self._table.version, rows, limits):
            return last, False
        bucket = self._runner.bucket(len(rows))
        padded = rows if len(rows) == bucket else (*rows, DUMMY_ROW)
        sampling = tuple(self._table.sampling(row) for row in rows)
        flavour = self._runner.flavour(self._table.flavour(padded))
        self._composition = Composition(self._table.version, rows, limits, flavour, sampling)
        return self._composition, True

    def _run(self, key: StepKey) -> None:
        """The step itself, over the buffers alone."""
        if key.group == UNCHECKED:
            assert self._drafting is not None
            self._drafting.propose(self._opened[: key.n_rows], key.max_len, key.flavour)
            return
        stage, table, flavour = self._stage, self._table, key.flavour
        batch = self._buffers.derive(key.n_rows, key.max_len, key.group)
        incoming = None
        if self._relay is not None:
            incoming = self._relay.receive(self._n_steps, batch.verify.n_tokens)
        started = time.perf_counter()
        frame, taps = stage.forward(incoming, self._caches, batch.verify)
        logits = self._head.projection(stage.hidden(frame))
        if not flavour.is_plain:
            logits = self._head.whole(logits)
        logits = logits.unflatten(0, (key.n_rows, key.group))
        self._forward_s = time.perf_counter() - started
        drawn_BX = self._settle(batch, logits, flavour)
        drawn_BG, accepted_B = drawn_BX[:, :-1], drawn_BX[:, -1]
        if flavour.counts:
            is_emitted_BG = self._offsets_G[: key.group] <= accepted_B.unsqueeze(1)
            table.edits.count(batch.rows_B, drawn_BG, is_emitted_BG)
        if self._drafting is not None:
            self._drafting.advance(batch.rows_B, batch.base_B, accepted_B, taps)
            if key.proposes:
                self._drafting.propose(batch.rows_B, key.max_len, flavour)
        self._drawn.write(drawn_BX, logits, flavour)
        if table.confidence_RK is not None:
            self._drawn.confidence[: key.n_rows].copy_(table.confidence_RK[batch.rows_B])

    def _settle(self, batch: GroupBatch, logits_BGV: Tensor, flavour: Flavour) -> Tensor:
        """Judge the groups and overwrite their rows; tokens and accepted drafts, [B, G + 1], on every rank.

        logits: of a plain flavour, those of this rank's slice of the vocabulary.
        """
        table, rows_B = self._table, batch.rows_B
        is_judged = flavour.is_plain or (self._shard.size == 1 and not flavour.sampled)
        if self._greedy is not None and is_judged:
            scores = logits_BGV
            if flavour.edits:
                scores = self._scores(batch, table.recipe(rows_B, flavour), logits_BGV)
            words = drafts.RowWords(batch.base_B, table.base_R, table.anchor_R, table.read_column_R)
            return self._greedy(scores, batch.drafts_BK, batch.draft_len_B, rows_B, words)
        if flavour.is_plain:
            drawn_BG = self._head.best(logits_BGV.flatten(0, 1)).view(logits_BGV.shape[:2])
            drawn_BX = _with_accepted(batch, drawn_BG)
        else:
            drawn_BX = self._shard.broadcast(self._judge(batch, logits_BGV, flavour))
        drawn_BG, accepted_B = drawn_BX[:, :-1], drawn_BX[:, -1]
        bonus_B = drawn_BG.gather(1, accepted_B.unsqueeze(1)).squeeze(1)
        table.commit(rows_B, batch.base_B, accepted_B, bonus_B)
        return drawn_BX

    def _judge(self, batch: GroupBatch, logits_BGV: Tensor, flavour: Flavour) -> Tensor:
        """Tokens as emitted and accepted drafts of each row, [B, G + 1]; ranks other than 0 only make room for them."""
        n_rows, group = logits_BGV.shape[:2]
        if self._shard.rank != 0:
            return batch.rows_B.new_empty(n_rows, group + 1)
        recipe = self._table.recipe(batch.rows_B, flavour, self._draw)
        position_BG = batch.next_T.view(n_rows, group)
        scores = self._scores(batch, recipe, logits_BGV)
        if self._rule is not None and flavour.sampled and group > 1:
            return self._weigh(batch, recipe, scores, position_BG)
        return _with_accepted(batch, recipe.draw(scores, position_BG))

    def _scores(self, batch: GroupBatch, recipe: Recipe, logits_BGV: Tensor) -> Tensor:
        """What is drawn from, with the rows' edits and masks."""
        n_rows, group = logits_BGV.shape[:2]
        position_BG, allowed = batch.next_T.view(n_rows, group), None
        if recipe.flavour.masks:
            allowed = unpack_mask(self._masks.words_BGW[:n_rows, :group], self._table.vocab_size)
        return recipe.scores(logits_BGV, position_BG, batch.drafts_BK, allowed)

    def _weigh(
        self, batch: GroupBatch, recipe: Recipe, scores_BGV: Tensor, position_BG: Tensor
    ) -> Tensor:
        """As `_judge`, by a rule that weighs what the target gives a draft against what the drafter gave it."""
        assert self._rule is not None
        assert self._table.proposal_RKV is not None
        p_BGV = recipe.probabilities(scores_BGV)
        n_drafts = batch.drafts_BK.shape[1]
        q_BKV = self._table.proposal_RKV[batch.rows_B, :n_drafts].to(p_BGV.dtype)
        # drafts of greedy requests are best guesses, and a batch of such requests alone keeps no proposals
        if recipe.flavour.greedy:
            guess = one_hot(batch.drafts_BK, q_BKV.shape[-1], q_BKV.dtype)
            q_BKV = torch.where(recipe.params.greedy_B.view(-1, 1, 1), guess, q_BKV)
        u_BK = recipe.params.uniform(
            position_BG[:, :-1], Purpose.ACCEPT, self._offsets_G[:n_drafts]
        )
        accepted_B, final_BV = self._rule(p_BGV, q_BKV, batch.drafts_BK, batch.draft_len_B, u_BK)
        accepted_B1 = accepted_B.unsqueeze(1)
        u_B1 = recipe.params.uniform(position_BG.gather(1, accepted_B1), Purpose.RESIDUAL)
        final_B1 = pick(final_BV, u_B1.squeeze(1)).unsqueeze(1)
        emitted_BG = torch.cat((batch.drafts_BK, final_B1), 1).scatter(1, accepted_B1, final_B1)
        return torch.cat((emitted_BG, accepted_B1), 1)

    def _heed_grammars(self, now: Composition) -> None:
        """Bring grammars up to date and set the masks of this step; waits for earlier steps where there are any."""
        while self._unread and (now.flavour.masks or len(self._unread) >= len(self._staging)):
            outcome, grammars = self._unread.popleft()
            for grammar, ids in zip(grammars, outcome.tokens(), strict=True):
                for token in ids if grammar is not None else ():
                    assert grammar is not None
                    grammar.accept(token)
        if now.flavour.masks and self._shard.rank == 0:
            grammars = [self._table.grammar(row) for row in now.rows]
            drafts = self._buffers.drafts(len(now.rows))
            self._masks.fill(grammars, drafts)

    def _outcome(self, now: Composition, bucket: int, proposes: bool, forward_s: float) -> Outcome:
        host = self._staging[0]
        self._staging.rotate(-1)
        host.read(self._drawn, bucket, now.flavour)
        event = self._device.record()
        outcome = Outcome(now.sampling, host, event, forward_s, proposes)
        if now.flavour.masks:
            self._unread.append((outcome, tuple(map(self._table.grammar, now.rows))))
        return outcome


def _with_accepted(batch: GroupBatch, drawn_BG: Tensor) -> Tensor:
    """Tokens and accepted drafts, [B, G + 1], where a draft is accepted that was drawn."""
    accepted_B = accept(drawn_BG, batch.drafts_BK, batch.draft_len_B)
    return torch.cat((drawn_BG, accepted_B.unsqueeze(1)), 1)


def apply_rows(table: RowTable, plan: plan_pb2.StepPlan) -> None:
    """Closed rows first, then opened ones; then every row of the step must be of the epoch the front means."""
    for closed in plan.close_rows:
        table.close(closed.row, closed.epoch)
    for opened in plan.open_rows:
        table.open(opened)
    for row in plan.verify_rows:
        table.check_epoch(row.row, row.epoch)
