"""Which piece of which prompt is computed next. Pure: no clock, no sockets, no tensors.

`submit`, `abort` and `release` change the set of prompts, `plan` says what to compute next, `advance` absorbs the
acknowledgement of the oldest plan. Progress is counted when a chunk is *planned*, so the next chunk of a prompt can
enter the first stage while the one before is downstream; what a plan covers is frozen in its chunks, and an
acknowledgement is judged by those alone.

A prompt takes all its pages and its state slot when it starts, in order of arrival: what runs can always finish, so
no deadlock is possible. What earlier prompts left in the cache it skips (`prefix_cache.py`), and where its own state is
worth keeping its chunks are cut (`ladder.py`). Prompts with little left ("short") get a reserved share of every step;
long ones share the rest, at most `max_long` at a time; what a class does not use goes to the least recently served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from k3.cache.pages import PageCounts
from k3.errors import QueueFull, RequestRejected
from prefill_svc.core.budget import Budget
from prefill_svc.core.cache_events import OnEvent, unheard
from prefill_svc.core.checkpoints import Mode, StateCounts
from prefill_svc.core.ladder import Ladder
from prefill_svc.core.plan import Chunk, Plan, Policy
from prefill_svc.core.prefix_cache import Holding, PrefixCache, Prompt, Row
from prefill_svc.core.request import Event, PrefillRequest, State


class PrefillScheduler:
    """All prompts of one instance, and the pages and state slots they hold."""

    def __init__(
        self,
        policy: Policy,
        *,
        n_pages: int,
        n_slots: int,
        page_tokens: int,
        ladder: Ladder | None = None,
        mode: Mode = Mode.FORK_AT_SCHEDULE,
        on_event: OnEvent = unheard,
        first_slot: int = 0,
    ) -> None:
        """n_pages, n_slots: what may be handed out; dummies are not among them. ladder: None = no checkpoints."""
        self.policy = policy
        self.ladder = ladder = ladder or Ladder(page_tokens)
        has_holds = policy.max_inflight > 1
        self.cache = PrefixCache(n_pages, n_slots, ladder, mode, has_holds, on_event, first_slot)
        self._requests: dict[int, PrefillRequest] = {}
        self._waiting: deque[PrefillRequest] = deque()
        self._running: dict[int, PrefillRequest] = {}
        self._inflight: deque[tuple[Plan, tuple[Row, ...]]] = deque()
        self._last_step = 0

    # ------------------------------------------------------------ requests in and out

    def submit(
        self,
        key: int,
        prompt_len: int,
        now: float,
        *,
        chain: tuple[bytes, ...] = (),
        takes_hits: bool = True,
    ) -> PrefillRequest:
        """Queue a prompt. Raises RequestRejected when it can never fit, QueueFull when too many wait.

        chain: hash of every whole page, () = neither found nor cached. takes_hits: false = compute every token.
        """
        if prompt_len < 1:
            raise RequestRejected("the prompt is empty; send at least one token", param="token_ids")
        needed = self.pages_for(prompt_len)
        if needed > self.cache.n_pages:
            raise RequestRejected(
                f"a prompt of {prompt_len} tokens needs {needed} pages of {self.ladder.page_tokens}, this "
                f"instance has {self.cache.n_pages}; send a shorter prompt or raise cache.pages",
                param="token_ids",
            )
        free_places = max(0, self.policy.max_running - len(self._running))
        if len(self._waiting) >= self.policy.max_queue + free_places:
            raise QueueFull(
                f"{len(self._waiting)} prompts wait already, schedule.max_queue="
                f"{self.policy.max_queue}; try later or another instance"
            )
        return self._queue(key, Prompt(prompt_len, chain, takes_hits), now)

    def adopt(self, key: int, holding: Holding, now: float) -> PrefillRequest:
        """Queue a prompt whose memory somebody else reserved, and takes back after `release`."""
        return self._queue(key, holding.prompt, now, holding)

    def _queue(
        self, key: int, prompt: Prompt, now: float, holding: Holding | None = None
    ) -> PrefillRequest:
        if key in self._requests:
            raise AssertionError(f"request {key} was submitted twice")
        request = PrefillRequest(key, 1, prompt, now, self._last_step)
        request.holding, request.is_adopted = holding, holding is not None
        self._requests[key] = request
        self._waiting.append(request)
        return request

    def abort(self, key: int) -> None:
        """Plan nothing more for a prompt. What it holds stays pinned until `release`. Idempotent."""
        request = self._requests.get(key)
        if request is None or request.state is State.ABORTED:
            return
        if request.state is State.WAITING:
            self._waiting.remove(request)
        self._running.pop(key, None)
        request.on(Event.ABORT)
        request.epoch += 1
        if request.holding is not None:
            self.cache.close(request.holding)

    def release(self, key: int) -> None:
        """Give back pages and slot of a prompt that was sent or aborted; forget it. Idempotent.

        Plans in flight may still write to them: that is safe, because every later plan that reuses them runs later
        on every rank. Transfers are not ordered by plans: the caller has proven them quiet.
        """
        request = self._requests.get(key)
        if request is None:
            return
        if request.state is not State.ABORTED:
            request.on(Event.RELEASE)
        del self._requests[key]
        if request.holding is not None and not request.is_adopted:
            self.cache.release(request.holding)

    # ------------------------------------------------------------ plan and acknowledgement

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nothing can be computed or enough plans are in flight."""
        if len(self._inflight) >= self.policy.max_inflight:
            return None
        grants = self._grants()
        for request in tuple(self._waiting):  # first: a checkpoint never takes a prompt's slot
            if request.key in grants and not self._start(request, now):
                break
        served = [r for r in self._running.values() if r.key in grants]
        if not served:
            return None
        self._last_step += 1
        cut = [self._chunk(request, grants[request.key]) for request in served]
        plan = Plan(self._last_step, tuple(chunk for chunk, _ in cut))
        self._inflight.append((plan, tuple(row for _, row in cut)))
        return plan

    def advance(self, step_id: int, finished: Collection[tuple[int, int]]) -> list[Chunk]:
        """Absorb the acknowledgement of the oldest plan; returns its chunks whose request is still the same one.

        finished: (key, epoch) of every prompt for which a token was drawn. Raises AssertionError when plan or
        prompts are not the ones that were planned: acknowledgements come in order, one per plan.
        """
        oldest = self._inflight[0][0].step_id if self._inflight else None
        if oldest != step_id:
            raise AssertionError(f"step {step_id} acknowledged, the oldest in flight is {oldest}")
        plan, rows = self._inflight.popleft()
        expected = {(c.key, c.epoch) for c in plan.chunks if c.is_final}
        if expected != set(finished):
            raise AssertionError(
                f"step {step_id} drew tokens for {sorted(finished)}, planned {sorted(expected)}"
            )
        self.cache.acknowledge(rows)
        current: list[Chunk] = []
        for chunk in plan.chunks:
            request = self._requests.get(chunk.key)
            if request is None or request.epoch != chunk.epoch:
                continue
            if chunk.is_final:
                request.on(Event.TOKEN)
                self._running.pop(chunk.key)
            current.append(chunk)
        return current

    # ------------------------------------------------------------ what is going on

    def pages_for(self, prompt_len: int) -> int:
        """Pages a prompt occupies."""
        return self.cache.pages_for(prompt_len)

    def position(self, key: int) -> int:
        """Prompts that wait ahead of this one; 0 once it runs."""
        for ahead, request in enumerate(self._waiting):
            if request.key == key:
                return ahead
        return 0

    def findable(self, key: int) -> int:
        """Tokens of a prompt that it would find in the cache now."""
        return self.cache.look(self._requests[key].prompt).hit * self.ladder.page_tokens

    def request(self, key: int) -> PrefillRequest | None:
        """The prompt, or None once it is released."""
        return self._requests.get(key)

    @property
    def n_waiting(self) -> int:
        """Prompts without pages."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Prompts being computed."""
        return len(self._running)

    @property
    def n_held(self) -> int:
        """Prompts that wait for their state to be filed."""
        return sum(request.is_held for request in self._running.values())

    @property
    def n_open(self) -> int:
        """Prompts not yet released, those being sent included."""
        return len(self._requests)

    @property
    def n_inflight(self) -> int:
        """Plans not yet acknowledged."""
        return len(self._inflight)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that no plan covers yet."""
        return sum(r.remaining for r in self._waiting) + sum(
            r.remaining for r in self._running.values()
        )

    @property
    def pinned_pages(self) -> int:
        """Pages of prompts that are computed but not yet let go."""
        done = (r for r in self._requests.values() if r.key not in self._running)
        return len({page for request in done for page in request.pages})

    def page_counts(self) -> PageCounts:
        """Pages by state."""
        return self.cache.page_counts()

    def slot_counts(self) -> StateCounts:
        """State slots by state."""
        return self.cache.slot_counts()

    # ------------------------------------------------------------ making a plan

    def _grants(self) -> dict[int, int]:
        """Tokens of the next step per request: reserve for short ones, shares for long ones, then what is left."""
        policy = self.policy
        candidates = self._candidates()
        short = [r for r in candidates if self._is_short(r)]
        long = [r for r in candidates if not self._is_short(r)]
        budget = Budget(policy.token_budget, policy.chunk_align, self._cut)
        reserve = int(policy.short_share * policy.token_budget) if long else policy.token_budget
        for request in short:
            before = budget.left
            # Rounded down, the rest of the reserve would be lost in every step.
            budget.give(request, -(-reserve // policy.chunk_align) * policy.chunk_align)
            reserve -= before - budget.left
        long.sort(key=_least_recently_served)
        for n_served, request in enumerate(long):
            budget.give(request, budget.left // (len(long) - n_served))
        for request in sorted(candidates, key=_least_recently_served):
            budget.give(request, budget.left)
        if not budget.granted and candidates:
            neediest = min(candidates, key=_least_recently_served)
            budget.granted[neediest.key] = min(neediest.remaining, policy.token_budget)
        return budget.granted

    def _candidates(self) -> list[PrefillRequest]:
        """Prompts that a chunk could be given to, in order of arrival; waiting ones only if all of them fit.

        Of waiting prompts that may be long only as many are looked up in the cache as could run; one further behind
        counts as long before it has its turn.
        """
        going = [r for r in self._running.values() if r.remaining > 0]
        found = [r for r in going if not r.is_held]
        n_long, n_looks = sum(not self._is_short(r) for r in going), self.policy.max_running
        places = self.policy.max_running - len(self._running)
        pages, slots = self.cache.available_pages, self.cache.available_slots
        for request in self._waiting:
            if request.prompt_len > self.policy.short_len:
                if n_looks == 0 and n_long >= self.policy.max_long:
                    continue
                n_looks = max(0, n_looks - 1)
            gate = self.cache.look(request.prompt)
            reserved = request.hit_tokens
            request.planned = max(reserved, gate.hit * self.ladder.page_tokens)
            is_long = not self._is_short(request)
            if is_long and n_long >= self.policy.max_long:
                continue  # a short prompt may pass a long one that waits for its turn, but never for memory
            if request.holding is not None:
                found.append(request)
                n_long += is_long
                continue
            n_pages, n_slots = self.cache.cost(request.prompt, gate)
            pages -= n_pages
            places -= 1
            if slots < 1 or min(pages, places) < 0:
                break
            slots -= n_slots
            n_long += is_long
            found.append(request)
        return found

    def _is_short(self, request: PrefillRequest) -> bool:
        return request.remaining <= self.policy.short_len

    def _cut(self, request: PrefillRequest, tokens: int) -> int:
        """Tokens of the next chunk when it may have `tokens`: it ends where the state is worth keeping."""
        start, demand = request.planned, 0 if request.holding is None else request.holding.demand
        if self.policy.chunk_cost is not None:
            tokens = min(tokens, self.policy.chunk_cost.length(start, self.policy.chunk_align))
        return self.ladder.cut(start, start + tokens, request.prompt_len, demand) - start

    def _start(self, request: PrefillRequest, now: float) -> bool:
        """Take memory for a waiting prompt; false when an earlier start of this step took what it had counted on."""
        holding = request.holding
        if holding is not None:
            self.cache.begin(holding)
        else:
            holding = self.cache.start(request.prompt)
        if holding is None:
            return False
        request.holding, request.planned, request.started_s = holding, holding.start, now
        request.on(Event.START)
        self._waiting.remove(request)
        self._running[request.key] = request
        return True

    def _chunk(self, request: PrefillRequest, tokens: int) -> tuple[Chunk, Row]:
        """Freeze the next chunk of a prompt, of at most `tokens`, and count it as planned."""
        holding = request.holding
        assert holding is not None
        start = request.planned
        request.planned += self._cut(request, min(tokens, request.remaining))
        request.last_step = self._last_step
        row = self.cache.row(holding, start, request.planned)
        chunk = Chunk(
            key=request.key,
            epoch=request.epoch,
            start=start,
            length=request.planned - start,
            is_final=request.planned >= request.prompt_len,
            pages=request.pages[: self.pages_for(request.planned)],
            read_slot=row.state.read_slot,
            write_slot=row.state.write_slot,
            copy_slot=row.state.copy_slot,
        )
        return chunk, row


def _least_recently_served(request: PrefillRequest) -> tuple[int, int]:
    return request.last_step, request.key
