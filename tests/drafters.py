"""Drafter folders and a local speculative engine: prefill with a context writer, rings, verify steps, one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from decode_svc.ledger import Ledger
from decode_svc.rank.drafting import Drafting
from decode_svc.rank.graphs import Eager, GraphRunner
from decode_svc.rank.rows import RowTable
from decode_svc.rank.step import VerifyStep, apply_rows
from k3.device import CpuDevice
from k3.model.draft_ring import DraftRing
from k3.model.dspark import open_drafter
from k3.model.dspark_spec import DraftSpec, ring_places
from k3.model.k3 import Stage
from k3.model.layers import wide
from k3.model.spec import K3Spec
from k3.parallel.mesh import WHOLE
from k3.rpc.convert import logprobs_to_proto, sampling_to_proto, stop_to_proto
from k3.sampling import RowSampling, TokenCounts, sample
from k3.types import LogprobParams, SamplingParams, StopParams, TokenEvent
from k3.v1 import plan_pb2
from tests.model_runner import Pools, Request

CPU = torch.device("cpu")
MASK = 1
KNOWN = 20.0  # loud enough to decide nearly every draft


def random_drafter(
    folder: Path,
    target: K3Spec,
    flavour: str,
    seed: int,
    stream: str = "prefix",
    block: int = 7,
    follows: Sequence[tuple[int, int]] = (),
    loudness: float = KNOWN,
) -> Path:
    """A drafter folder of this target with random weights; taps in an order that is not ascending.

    follows: (token, next token) pairs that the sequential head knows, so that some drafts are accepted. loudness: how
    much louder than its noise, which is about as loud as what the block itself says.
    """
    h = target.hidden_size
    inner: dict[str, Any] = {
        "target_layer_ids": [4, -1, 1],
        "tap_stream": stream,
        "mask_token_id": MASK,
        "markov_rank": 64 if follows else 6,
        "enable_confidence_head": True,
    }
    config: dict[str, Any] = {
        "hidden_size": h,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": target.vocab_size,
        "block_size": block,
    }
    if flavour == "mla":
        dims = {"q_lora_rank": 20, "kv_lora_rank": 24, "v_head_dim": 12}
        config |= dims | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "model_type": "k3_dspark"}
        config |= inner
    else:
        config |= {"num_key_value_heads": 4, "head_dim": 12, "model_type": "qwen3"}
        config["dflash_config"] = inner
    spec = DraftSpec.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape[0])
        if name.endswith("norm.weight")
        else torch.randn(shape[0], generator=generator) * shape[0][-1] ** -0.5
        for name, shape in spec.tensors(confidence=True).items()
    }
    if follows:
        previous, following = torch.tensor(list(follows)).T
        known = tensors["markov_head.markov_w1.weight"][previous]
        tensors["markov_head.markov_w2.weight"].index_add_(0, following, loudness * known)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Answer:
    """What one request got. accepted: drafts accepted in each of its steps."""

    events: list[TokenEvent]
    accepted: list[int] = field(default_factory=list[int])

    @property
    def ids(self) -> list[int]:
        return [event.id for event in self.events]

    @property
    def length(self) -> float:
        """Mean tokens per step."""
        return 1 + sum(self.accepted) / max(1, len(self.accepted))


class LocalEngine:
    """Requests through one stage; with a drafter folder they speculate. The stage must carry its taps."""

    def __init__(
        self,
        stage: Stage,
        n_requests: int,
        max_tokens: int,
        *,
        drafter: Path | None = None,
        draft_tokens: int = 0,
        window: int = 0,
        page_tokens: int = 4,
        dtype: str = "float64",
        buckets: tuple[int, ...] = (),
        runner: GraphRunner | None = None,
        acceptance: str = "match",
        depth: int = 1,
    ) -> None:
        """runner: instead of an eager one over `buckets`. depth: steps whose answers may be unread."""
        self.stage, self.draft_tokens = stage, draft_tokens
        self.page_tokens = page_tokens
        group = 1 + draft_tokens
        room = max_tokens + 2 * group
        self.pools = Pools(stage, n_requests, room, page_tokens, columns=group, seed=3)
        width = self.pools.requests[0].pages.shape[0]
        proposals = None if acceptance == "match" else wide(stage.dtype)
        self.table = RowTable(
            n_requests, width, draft_tokens, stage.spec.vocab_size, CPU, proposals
        )
        self.drafter = self.ring = drafting = None
        if drafter is not None and stage.embed is not None and stage.head is not None:
            self.drafter = open_drafter(
                drafter,
                WHOLE,
                stage.groups.shard,
                draft_tokens=draft_tokens,
                embed=stage.embed,
                head=stage.head,
                dtype=dtype,
                device=CPU,
                ops=stage.ops.dense,
            )
            window = window or -(-room // page_tokens) * page_tokens
            places = ring_places(window, group, page_tokens)
            shape = (
                (n_requests + 2) * places,
                *self.drafter.spec.place_shape(page_tokens, 1),
            )
            pool = torch.full(shape, float("nan"), dtype=stage.dtype)
            self.ring = DraftRing(pool, places, window)
            drafting = Drafting(self.drafter, self.ring, self.table)
        self.step = VerifyStep(
            stage,
            self.pools.caches,
            self.table,
            Ledger(page_tokens),
            runner or Eager(buckets),
            CpuDevice(1),
            max_rows=n_requests,
            group=group,
            depth=depth,
            drafting=drafting,
            acceptance=acceptance,
        )
        self.room = room

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: Sequence[SamplingParams],
        *,
        chunk: int = 5,
        hand_over: bool = True,
        end_ids: tuple[int, ...] = (),
        logprobs: LogprobParams | None = None,
        draft_lens: Sequence[int] | None = None,
    ) -> list[Answer]:
        """All prompts at once; every answer has `n` tokens, or ends with the first of `end_ids`.

        draft_lens: drafts at most of each request; all by default.
        """
        answers: list[Answer] = []
        for i, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
            place = self.pools.requests[i]
            logits = self._prefill(place, prompt, chunk, hand_over=hand_over)
            row = RowSampling(how, (), logprobs or LogprobParams(), len(prompt))
            counts = TokenCounts(logits.shape[1], prompt_ids=prompt) if how.needs_counts else None
            [first] = sample(logits[-1:], [row], [len(prompt)], [counts])
            answers.append(Answer([first]))
            self._open(i, place, prompt, first, how, hand_over, end_ids, logprobs)
        while True:
            rows = [i for i, a in enumerate(answers) if not self._is_done(a, n, end_ids)]
            if not rows:
                return answers
            limits = None if draft_lens is None else [draft_lens[i] for i in rows]
            outcome = self.step.launch(
                [i + 1 for i in rows], self.room - 1 - self.draft_tokens, limits
            )
            for i, events in zip(rows, outcome.answers(), strict=True):
                answers[i].accepted.append(len(events) - 1)
                for event in events:
                    if not self._is_done(answers[i], n, end_ids):
                        answers[i].events.append(event)

    def _is_done(self, answer: Answer, n: int, end_ids: tuple[int, ...]) -> bool:
        return len(answer.events) >= n or answer.events[-1].id in end_ids

    def _prefill(
        self, place: Request, prompt: Sequence[int], chunk: int, *, hand_over: bool
    ) -> torch.Tensor:
        """Chunk by chunk; context rows go straight into the request's ring, at absolute positions."""
        logits: list[torch.Tensor] = []
        for at in range(0, len(prompt), chunk):
            ids = prompt[at : at + chunk]
            output = self.pools.chunk([(place, ids)])
            logits.append(self.pools.logits(output))
            if self.drafter is not None and self.ring is not None and hand_over:
                positions = torch.arange(at, at + len(ids))
                rows = self.drafter.context(output.taps_TXD, positions)
                keep = positions >= len(prompt) - self.ring.window  # older ones share their places
                self.ring.write(rows, torch.full_like(positions, place.slot), positions, keep)
        return torch.cat(logits)

    def _open(
        self,
        i: int,
        place: Request,
        prompt: Sequence[int],
        first: TokenEvent,
        how: SamplingParams,
        draft_valid: bool,
        end_ids: tuple[int, ...],
        logprobs: LogprobParams | None,
    ) -> None:
        opened = plan_pb2.OpenRow(
            row=i + 1,
            epoch=1,
            base=len(prompt),
            anchor=first.id,
            pages=place.pages.tolist(),
            state_slot=place.slot,
            draft_valid=draft_valid,
            sampling=sampling_to_proto(how),
            stop=stop_to_proto(StopParams(99, stop_token_ids=end_ids)),
            logprobs=logprobs_to_proto(logprobs or LogprobParams()),
            draft_len=self.draft_tokens,
            prompt_ids=prompt if how.needs_prompt_ids else (),
            output_ids=[first.id],
        )
        apply_rows(self.table, plan_pb2.StepPlan(open_rows=[opened]))
        if opened.draft_len:
            self.step.open([i + 1], len(prompt))
