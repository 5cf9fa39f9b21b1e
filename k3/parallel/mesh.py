"""Which rank does what: pipeline stages, tensor parallelism, context parallelism.

Ranks are stage major: `rank = stage * tp * cp + tp_rank * cp + cp_rank`, cp is the minor axis.
Inside a stage everything except MLA attention sees context-parallel ranks as more tensor-parallel
ranks (`Place.shard`: index `tp_rank * cp + cp_rank` of `tp * cp`); only the MLA query phase splits
heads over tp alone (`Place.query_shard`). A mesh is immutable and never re-interpreted in place.
No torch here: fronts and planners use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from k3.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """Piece `index` of `count` equal pieces."""

    index: int = 0
    count: int = 1

    def size(self, n: int) -> int:
        """Length of this piece of an axis of length `n`. Raises ConfigError when `n` is not divisible."""
        if n % self.count:
            raise ConfigError(
                f"an axis of {n} cannot be split over {self.count} ranks; choose tp * cp among the "
                f"divisors of {n}"
            )
        return n // self.count

    def of(self, n: int) -> slice:
        """This piece of an axis of length `n`."""
        size = self.size(n)
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the three axes of one group of ranks.

    partition: layers per stage, or None for the balanced split of `stage_layers`.
    """

    pp: int = 1
    tp: int = 1
    cp: int = 1
    partition: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, n in (("pp", self.pp), ("tp", self.tp), ("cp", self.cp)):
            if n < 1:
                raise ConfigError(f"mesh {name}={n}: must be at least 1")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.cp

    @property
    def stage_size(self) -> int:
        """Ranks of one stage: tensor-parallel size once cp ranks count as tp ranks."""
        return self.tp * self.cp

    def place(self, rank: int) -> Place:
        """Coordinates of `rank`."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank {rank} is not in a mesh of {self.size} ranks ({self})")
        stage, shard = divmod(rank, self.stage_size)
        tp_rank, cp_rank = divmod(shard, self.cp)
        return Place(self, stage, tp_rank, cp_rank)

    def rank(self, stage: int, tp_rank: int = 0, cp_rank: int = 0) -> int:
        """Inverse of `place`."""
        return stage * self.stage_size + tp_rank * self.cp + cp_rank

    def stage_groups(self) -> tuple[tuple[int, ...], ...]:
        """Per stage its ranks, in shard order: the groups of all-reduces."""
        n = self.stage_size
        return tuple(tuple(range(stage * n, (stage + 1) * n)) for stage in range(self.pp))

    def context_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share one tp slice of one stage: the groups of the helix exchange."""
        return tuple(
            tuple(self.rank(stage, tp_rank, cp_rank) for cp_rank in range(self.cp))
            for stage in range(self.pp)
            for tp_rank in range(self.tp)
        )

    def repurposed(self) -> Mesh:
        """The same ranks with every cp rank seen as a tp rank."""
        return Mesh(self.pp, self.stage_size, 1, self.partition)

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """Layers of each stage.

        The remainder of `num_layers / pp` goes to the stages before the last one, from the back, so
        the last stage (norm, head, drafter) never takes it. Golden: prefix/relay_layout.json.
        """
        if self.pp > num_layers:
            raise ConfigError(
                f"pp={self.pp} stages for {num_layers} layers: every stage needs a layer; lower pp",
                code="PP_GT_LAYERS",
            )
        counts = self.partition or _balanced(num_layers, self.pp)
        for wrong, code, expected in (
            (len(counts) != self.pp, "PP_PARTITION_COUNT", f"{self.pp} entries, one per stage"),
            (min(counts) < 1, "PP_PARTITION_EMPTY", "at least one layer per stage"),
            (sum(counts) != num_layers, "PP_PARTITION_SUM", f"a sum of {num_layers} layers"),
        ):
            if wrong:
                raise ConfigError(
                    f"pipeline partition {list(counts)}: expected {expected}", code=code
                )
        starts = [sum(counts[:i]) for i in range(self.pp + 1)]
        return tuple(range(a, b) for a, b in pairwise(starts))


def _balanced(num_layers: int, pp: int) -> tuple[int, ...]:
    base, rest = divmod(num_layers, pp)
    return tuple(base + (1 <= pp - 1 - stage <= rest) for stage in range(pp))


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's coordinates in its mesh."""

    mesh: Mesh
    stage: int
    tp_rank: int
    cp_rank: int

    @property
    def rank(self) -> int:
        """Flat rank in the group."""
        return self.mesh.rank(self.stage, self.tp_rank, self.cp_rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the final norm and the head."""
        return self.stage == self.mesh.pp - 1

    @property
    def shard(self) -> Shard:
        """Piece of heads, experts, widths and vocabulary that is this rank's."""
        return Shard(self.tp_rank * self.mesh.cp + self.cp_rank, self.mesh.stage_size)

    @property
    def query_shard(self) -> Shard:
        """Piece of the MLA heads whose queries this rank computes: split over tp, not over cp."""
        return Shard(self.tp_rank, self.mesh.tp)

    @property
    def previous(self) -> int:
        """Rank that sends the frame to this one: same shard, stage before."""
        return self.mesh.rank(self.stage - 1, self.tp_rank, self.cp_rank)

    @property
    def next(self) -> int:
        """Rank that this one sends the frame to: same shard, stage after."""
        return self.mesh.rank(self.stage + 1, self.tp_rank, self.cp_rank)


SOLO = Mesh().place(0)
