"""What a rank hands to its service's loop: `RankContext`, the plan connection, the handle of the mover.

`k3/rank/main.py` builds it, `prefill_svc.rank.run` and `decode_svc.rank.loop.run` take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from k3.config.tree import EngineConfig
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.rank.channel import BlockingChannel
from k3.v1 import plan_pb2

if TYPE_CHECKING:
    from k3.cache.layout import CacheLayout
    from k3.cache.storage import Storage
    from k3.device import Device
    from k3.model.dspark import DraftContext, Drafter
    from k3.model.k3 import Stage
    from k3.parallel.collectives import Groups


class StepEvent(Protocol):
    """Marks a point of the device's work."""

    def query(self) -> bool:
        """Whether everything before the point is done; never blocks."""
        ...


class MoverHandle(Protocol):
    """What the step loop may say to the mover."""

    def step_done(self, step_id: int, event: StepEvent) -> None:
        """Step `step_id` is launched; its pages and states are complete when `event` is. Thread-safe, never blocks."""
        ...


class PlanEnd:
    """The rank's end of the plan connection; used by the step loop only."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel

    def receive(self) -> plan_pb2.FrontMessage:
        """Wait for the front's next message. Raises EOFError when the front is gone."""
        return self._channel.receive(plan_pb2.FrontMessage)

    def receive_ready(self) -> list[plan_pb2.FrontMessage]:
        """Messages that are already here, without waiting. Raises EOFError when the front is gone."""
        return self._channel.receive_ready(plan_pb2.FrontMessage)

    def send(self, message: plan_pb2.RankMessage) -> None:
        """Send one message to the front."""
        self._channel.send(message)


@dataclass(frozen=True, slots=True)
class RankContext:
    """Everything a service's rank loop needs.

    groups: the collectives of this rank (its stage, its context-parallel group, the pipeline).
    stage: the layers of this rank, weights loaded. storage: its pools, registered with the mover's agent.
    draft_context: writes draft rows (prefill, last stage). drafter: proposes (decode, last stage).
    """

    config: EngineConfig
    setup: plan_pb2.Setup
    rank: int
    spec: K3Spec
    mesh: Mesh
    groups: Groups
    device: Device
    stage: Stage
    layout: CacheLayout
    storage: Storage
    plans: PlanEnd
    mover: MoverHandle
    draft_context: DraftContext | None = None
    drafter: Drafter | None = None
