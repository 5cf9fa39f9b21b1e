"""Runs a job: one `Generate` call per choice, their tokens turned into text, updates handed to whoever answers.

Samples of a prompt use one pair; sample 0 goes first, so that the others meet its prefix in the cache. At most
MAX_PROMPTS prompts of a job run at once. A stop string ends its choice here and cancels the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from k3.telemetry.metrics import RouterMetrics
from k3.types import FinishReason, Speculation, StageTimes, StopParams
from router.fleet.attempt import Dispatcher, Finished, Sample, Tokens, Trace
from router.fleet.prefix import PromptPages
from router.openai.params import Job
from router.requests import OpenRequest, Stage
from router.text.folder import ModelFolder
from router.text.output import ChoiceText, Piece, PlainParser
from router.text.reasoning import ChannelParser

MAX_PROMPTS = 8


class End(NamedTuple):
    """How a choice ended. stop_reason: the stop string or id, None for an end of sequence."""

    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Update:
    """News of one choice: text, and its end at last."""

    index: int
    pieces: Sequence[Piece]
    end: End | None = None


class DraftStep(NamedTuple):
    """One step that checked drafts."""

    n_drafts: int
    n_accepted: int


@dataclass(slots=True)
class Choice:
    """A choice in the making."""

    index: int
    prompt_index: int
    text: ChoiceText
    trace: Trace = field(default_factory=Trace)
    cached_tokens: int = 0
    times: StageTimes = field(default_factory=StageTimes)
    speculation: Speculation | None = None
    steps: list[DraftStep] = field(default_factory=list[DraftStep])
    end: End | None = None
    first_token: asyncio.Event = field(default_factory=asyncio.Event)
    last_token_at: float = 0.0

    def drafted(self, total: Speculation | None) -> None:
        """A step's tokens came with the drafts of all steps so far, none of them without speculation."""
        before, self.speculation = self.speculation or Speculation((), 0), total
        if total is not None and total.n_steps > before.n_steps:
            n_accepted = total.n_accepted - before.n_accepted
            self.steps.append(DraftStep(total.n_drafts - before.n_drafts, n_accepted))


class Counts(NamedTuple):
    """Usage of a whole job."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    speculation: Speculation | None = None  # of the only choice, where it was asked for
    steps: Sequence[DraftStep] | None = None  # its steps, where they were


class Generation:
    """One job on its way. `started` (its arrival) and `deadline` are monotonic seconds."""

    def __init__(
        self,
        job: Job,
        request: OpenRequest,
        dispatcher: Dispatcher,
        folder: ModelFolder,
        metrics: RouterMetrics,
        started: float,
    ) -> None:
        self.job = job
        self.request = request
        self.started = started
        self.deadline = self.started + job.timeout_s
        self._dispatcher = dispatcher
        self._folder = folder
        self._metrics = metrics
        self._pages = [PromptPages(prompt, job.salt) for prompt in job.prompts]
        self._prompts_at_once = asyncio.Semaphore(MAX_PROMPTS)
        self.first_token_s: float | None = None
        self.choices = [self._choice(index) for index in range(job.n_choices)]

    async def run(self, emit: Callable[[Update], Awaitable[None]]) -> None:
        """Run to the end. Raises the first failure as itself; the other choices are cancelled then."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for prompt_index in range(len(self.job.prompts)):
                    group.create_task(self._prompt(prompt_index, emit))
        except BaseExceptionGroup as failures:
            failure = _first(failures)
        if failure is not None:
            raise failure

    @property
    def counts(self) -> Counts:
        """Tokens so far. Prompts count once, whatever the number of samples."""
        firsts = self.choices[:: self.job.n]
        return Counts(
            prompt_tokens=sum(len(prompt) for prompt in self.job.prompts),
            completion_tokens=sum(choice.text.n_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            reasoning_tokens=sum(choice.text.n_reasoning_tokens for choice in self.choices),
            speculation=firsts[0].speculation if self._spec_stats != "off" else None,
            steps=firsts[0].steps if self._spec_stats == "detailed" else None,
        )

    @property
    def _spec_stats(self) -> str:
        return self.job.spec_stats if len(self.choices) == 1 else "off"

    def _choice(self, index: int) -> Choice:
        job, tokenizer = self.job, self._folder.tokenizer
        parser = (
            ChannelParser(
                tokenizer,
                self._folder.chat_format.control,
                job.start,
                skip_special_tokens=job.skip_special_tokens,
            )
            if job.is_chat
            else PlainParser(tokenizer, skip_special_tokens=job.skip_special_tokens)
        )
        text = ChoiceText(
            parser,
            job.automaton,
            end_ids=frozenset(self._stop_params(0).end_ids),
            include_stop=job.include_stop,
            min_tokens=job.sampling.min_tokens,
        )
        return Choice(index, index // job.n, text)

    def _stop_params(self, prompt_index: int) -> StopParams:
        job = self.job
        return StopParams(
            job.max_tokens[prompt_index], job.eos_token_ids, job.stop_token_ids, job.ignore_eos
        )

    async def _prompt(self, prompt_index: int, emit: Callable[[Update], Awaitable[None]]) -> None:
        """All samples of one prompt."""
        n = self.job.n
        first, *others = self.choices[prompt_index * n : (prompt_index + 1) * n]
        async with self._prompts_at_once, asyncio.TaskGroup() as group:
            group.create_task(self._sample(first, emit))
            if others:
                await first.first_token.wait()
                for choice in others:
                    group.create_task(self._sample(choice, emit, after=first))

    async def _sample(
        self,
        choice: Choice,
        emit: Callable[[Update], Awaitable[None]],
        *,
        after: Choice | None = None,
    ) -> None:
        sample = self._sample_of(choice)
        pair = after.trace.pair if after else None
        async with aclosing(self._dispatcher.run(sample, choice.trace, at=pair)) as events:
            async for event in events:
                update = self._digest(choice, event)
                await emit(update)
                if update.end is not None:
                    return

    def _sample_of(self, choice: Choice) -> Sample:
        job = self.job
        sample_index = choice.index % job.n
        suffix = f"-{choice.index}" if job.n_choices > 1 else ""
        return Sample(
            request_id=self.request.request_id + suffix,
            token_ids=job.prompts[choice.prompt_index],
            sampling=replace(job.sampling, sample_index=sample_index),
            stop=self._stop_params(choice.prompt_index),
            logprobs=job.logprobs,
            salt=job.salt,
            deadline=self.deadline,
            n_samples=job.n,
            pages=self._pages[choice.prompt_index],
            session=job.session,
            draft_tokens=job.draft_tokens,
            on_dispatch=self._dispatched,
        )

    def _dispatched(self, trace: Trace) -> None:
        if self.request.stage is Stage.QUEUE:
            self.request.stage = Stage.PREFILL
        self.request.pairs.append(f"{trace.decode_id} <- {trace.prefill_id}")

    def _digest(self, choice: Choice, event: Tokens | Finished) -> Update:
        match event:
            case Tokens(tokens, cached_tokens, speculation):
                choice.cached_tokens = cached_tokens
                choice.drafted(speculation)
                self._observe(choice, len(tokens))
                pieces = choice.text.push(tokens)
                self.request.n_tokens += len(tokens)
                if choice.text.matched is None:
                    return Update(choice.index, pieces)
                choice.end = End("stop", choice.text.matched)
                return Update(choice.index, [*pieces, *choice.text.finish()], choice.end)
            case Finished(reason, stop_token_id, usage, times, _, speculation):
                choice.cached_tokens, choice.times = usage.cached_tokens, times
                choice.speculation = speculation
                choice.first_token.set()
                pieces = choice.text.finish()
                matched = choice.text.matched
                stop_reason = matched if matched is not None else stop_token_id
                ended = FinishReason.STOP if matched is not None else reason
                choice.end = End(ended.value, stop_reason)
                return Update(choice.index, pieces, choice.end)

    def _observe(self, choice: Choice, n_tokens: int) -> None:
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now - self.started
            self.request.stage = Stage.DECODE
            self._metrics.ttft_s.observe(self.first_token_s)
        if choice.first_token.is_set():
            self._metrics.itl_s.observe((now - choice.last_token_at) / max(n_tokens, 1))
        choice.first_token.set()
        choice.last_token_at = now


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first, without the groups around it."""
    failure = failures.exceptions[0]
    if not isinstance(failure, BaseExceptionGroup):
        return failure
    return _first(cast("BaseExceptionGroup[BaseException]", failure))
