"""What follows from the configuration of one decode service, beyond what every engine has: limits, pools, pairs.

State slot 0 and row 0 are dummies for padding and warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from decode_svc.depth import computes_prompts, plan_depth
from decode_svc.draft_policy import DraftPolicy
from decode_svc.gate import GateRule, SpeculationGate, no_cost
from decode_svc.intake.source import Pair
from decode_svc.ledger import Ledger
from decode_svc.memory import CachedMemory, Memory, PoolMemory
from decode_svc.request import DecodeRequest
from decode_svc.scheduler import DecodeScheduler, Limits
from k3.cache import hash_chain
from k3.cache.layout import DTYPE_BYTES, PROTO_VERSION
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.calibration import Calibration
from k3.config import speculation
from k3.errors import LayoutMismatch
from k3.model.spec import LayerKind
from k3.rank import deployment
from k3.transfer.plan import Pair as TransferPair
from k3.transfer.plan import check_pair, expected_senders
from k3.v1 import instance_pb2, plan_pb2, prefill_pb2
from prefill_svc.core import assembly
from prefill_svc.core.cache_events import OnEvent, unheard
from prefill_svc.core.scheduler import PrefillScheduler


@dataclass(frozen=True, slots=True)
class Deployment(deployment.Deployment):
    """A decode service; see the base."""

    ROLE: ClassVar = instance_pb2.ROLE_DECODE
    N_DUMMIES: ClassVar[int] = 1

    @property
    def longest_local(self) -> int:
        """Prompts up to this length are computed here."""
        is_alone = self.config.role == "both"
        bound = self.config.schedule.local_prefill_max
        return self.config.model.max_model_len if is_alone else bound

    @property
    def has_cache(self) -> bool:
        """Whether prompts computed here reuse what earlier ones left."""
        return computes_prompts(self.config) and assembly.has_cache(self.config)

    def prompts(self, on_event: OnEvent = unheard) -> PrefillScheduler | None:
        """A scheduler of prompts computed here, None where there are none; under `role: both` memory is its cache's."""
        if not computes_prompts(self.config):
            return None
        return assembly.prompt_scheduler(self.config, n_dummies=self.N_DUMMIES, on_event=on_event)

    def warnings(self) -> list[str]:
        """What works, but not as well as it could."""
        return assembly.held_up(self.config) if computes_prompts(self.config) else []

    def _memory(self, prompts: PrefillScheduler | None) -> Memory:
        config = self.config
        if prompts is not None and config.role == "both":
            by_row = speculation.keeps_context(config)
            return CachedMemory(prompts.cache, self._chain, has_rings_of_rows=by_row)
        n_slots = config.cache.state_slots - self.N_DUMMIES
        return PoolMemory(PagePool(config.cache.pages), SlotPool(n_slots, first=self.N_DUMMIES))

    def _chain(self, request: DecodeRequest) -> tuple[bytes, ...]:
        namespace = hash_chain.namespace(self.layout_fingerprint, self.draft_fingerprint)
        spec = request.spec
        return assembly.page_chain(self.config, namespace, spec.prompt, spec.salt)

    def scheduler(self, prompts: PrefillScheduler | None = None) -> DecodeScheduler:
        """A scheduler with empty pools. prompts: what `prompts` made, where prompts are computed here."""
        config = self.config
        return DecodeScheduler(
            Ledger(config.cache.page_tokens, self.mesh.cp),
            Limits(
                max_queue=config.schedule.max_queue,
                max_model_len=config.model.max_model_len,
                depth=plan_depth(config).steps,
                draft_tokens=config.spec.draft_tokens,
                is_staged=self.mesh.pp > 1,
            ),
            memory=self._memory(prompts),
            rows=SlotPool(config.schedule.max_rows, first=self.N_DUMMIES),
            policy=self._draft_policy(),
        )

    def _draft_policy(self) -> DraftPolicy:
        """Raises ConfigError when the calibration is gone since the configuration was judged."""
        spec, schedule = self.config.spec, self.config.schedule
        calibration = Calibration.read(Path(spec.calibration)) if spec.calibration else None
        gate = None
        if spec.gate_window:
            rule = GateRule(spec.gate_window, spec.gate_threshold, spec.gate_retry_steps)
            costs = no_cost
            if calibration is not None:
                costs = partial(calibration.break_even, group=1 + spec.draft_tokens)
            gate = SpeculationGate(rule, costs)
        return DraftPolicy(
            spec.draft_tokens,
            gate=gate,
            calibration=calibration if spec.draft_schedule == "confidence" else None,
            is_stale=schedule.depth > 1,
        )

    @property
    def latent_token_bytes(self) -> int:
        """Bytes that one token takes in the latent caches of all MLA layers."""
        layers = len(self.spec.layers_of(LayerKind.MLA))
        return layers * self.spec.mla.latent_width * DTYPE_BYTES[self.config.model.dtype]

    @property
    def exchange_bytes(self) -> int:
        """Bytes that one rank sends others per token of a step to merge attention, over all MLA layers.

        Per head: an output in the model's precision and its log-sum-exp, at least float32. `gather` sends all
        heads of its tp slice to every other rank, else each other context rank gets the heads it owns.
        """
        mla, parallel, dtype = self.spec.mla, self.config.parallel, self.config.model.dtype
        width = mla.kv_lora_rank if parallel.exchange == "latent" else mla.v_dim
        per_head = width * DTYPE_BYTES[dtype] + max(DTYPE_BYTES[dtype], DTYPE_BYTES["float32"])
        heads = mla.n_heads // parallel.tp
        away = heads * (parallel.cp - 1) // parallel.cp
        if parallel.exchange == "gather" and parallel.cp > 1:
            away = heads * (parallel.tp * parallel.cp - 1)
        return len(self.spec.layers_of(LayerKind.MLA)) * away * per_head

    def introduction(
        self, instance_id: str, movers: list[plan_pb2.MoverReady]
    ) -> prefill_pb2.ConnectRequest:
        """How this instance presents itself to a prefill instance. movers: in flat order, newest agents."""
        return prefill_pb2.ConnectRequest(
            proto_version=PROTO_VERSION,
            instance_id=instance_id,
            layout=self.layout,
            layout_fingerprint=self.layout_fingerprint,
            draft_fingerprint=self.draft_fingerprint,
            nixl_version=movers[0].nixl_version,
            geometry=self.geometry,
            ranks=[mover.endpoint for mover in movers],
        )

    def check(self, answer: prefill_pb2.ConnectResponse) -> None:
        """Raise LayoutMismatch unless the answering prefill instance fits this one."""
        if answer.layout_fingerprint != self.layout_fingerprint:
            raise LayoutMismatch(
                f"layout_fingerprint: ours {self.layout_fingerprint} != {answer.layout_fingerprint} of "
                f"{answer.instance_id}; give both sides the same model, dtype and cache.page_tokens"
            )
        check_pair(self.spec, answer.geometry, self.geometry)

    def senders(self, pair: Pair, prompt_len: int, rank: int) -> tuple[int, ...]:
        """Flat prefill ranks that decode rank `rank` hears from; may be empty."""
        return expected_senders(
            self.spec,
            pair.geometry,
            self.geometry,
            page_tokens=self.config.cache.page_tokens,
            prompt_len=prompt_len,
            rank=rank,
        )

    def draft_senders(self, pair: Pair, rank: int) -> tuple[int, ...]:
        """Flat prefill ranks that decode rank `rank` gets draft rows from; empty where none are sent."""
        if self.draft is None or not pair.sends_draft:
            return ()
        plan = TransferPair.of(self.spec, pair.geometry, self.geometry)
        return plan.draft_senders(rank, self.draft.split_axes().get("key heads"))

    def describe(self, instance_id: str) -> instance_pb2.DescribeResponse:
        """Constant during the life of an instance id."""
        described = deployment.Deployment.describe(self, instance_id)
        described.max_rows = self.config.schedule.max_rows
        described.draft_tokens = self.config.spec.draft_tokens
        described.depth = plan_depth(self.config).per_row
        described.local_prefill_max = self.longest_local
        return described
