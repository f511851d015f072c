"""How a job uses several clouds: the layers split over them, copies of the model in them, or both.

A *replica* is a copy of the whole pipeline. A strategy says how many there are, which clouds make
one, and how they stay together (an Averaging). To add one: a subclass of Averaging with its
settings and its Exchange in a file of its own, and a YAML in conf/strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, Rate, settings
from xcloud.layout import Cloud, ClusterLayout

if TYPE_CHECKING:
    from xcloud.pipeline.exchange import Exchange

_CHOOSE = "choose strategy=data_parallel, hybrid or local_updates"

WHOLE_MODEL = (0, 1)
"""The stages of a rank that holds all of a model whose cuts nobody asked for."""


@dataclass(frozen=True)
class Traits:
    """The facts about an averaging that other parts of xcloud must know.

    trains_locally: each replica makes updates of its own.
    is_elastic: the run continues where a cloud is late or lost, and everything goes through the
        first cloud.
    may_leave: a lost cloud does not end the run.
    restart_s: the seconds to wait before a lost cloud on this machine is restarted; None = never.
    every: the number of updates that a contribution of a replica sums up.
    equal_every: the number of updates after which all replicas are equal; 0 = only after the last.
    column: the column of checkpoints/resume.TABLE that applies.
    changes_results: the trained model differs from what one process would learn.
    per_step: the number of exchanges in a step, each of 1 / fragments of the trained values.
    hidden_steps: the number of steps that pass while one exchange crosses.
    num_copies: the number of copies of the trained values that each rank keeps.
    """

    trains_locally: bool = False
    is_elastic: bool = False
    may_leave: bool = False
    restart_s: float | None = None
    every: int = 1
    equal_every: int = 1
    column: str = "data parallel"
    changes_results: bool = True
    per_step: float = 1.0
    fragments: int = 1
    hidden_steps: float = 0.0
    num_copies: int = 1

    def next_merge(self, step: int) -> int:
        """Return the first step after this one in which anything is merged."""
        # Merges are spread evenly over `every` steps: the n-th comes at step n * every /
        # fragments.
        num_merges = -(-(step + 1) * self.fragments // self.every)  # the next one included
        return num_merges * self.every // self.fragments

    def max_contributions(self, num_updates: int) -> int:
        """Return how many contributions of a replica hold the same value in so many updates.

        The last update ends with a contribution.
        """
        full, rest = divmod(num_updates, self.every)
        # Fragments are merged in turn, so the last update may hold a part of two rounds.
        return full + (rest > 0 or self.fragments > 1)


class RobustMerge(Protocol):
    """A merge that a minority of bad replicas cannot move far (features/replicas/merging.py)."""

    def check(self, num_replicas: int) -> None:
        """Raise ConfigError if so few replicas cannot outvote a bad one."""


def everyone_merges(num_replicas: int, is_robust: bool) -> bool:
    """Return whether each replica merges all contributions itself.

    Two replicas send least so. Among more, a merge that bounds what one contribution does must not
    be left to any one replica; a sum or mean bounds nothing, so each may merge a part for all.
    """
    # Two exchange what they have; among more a robust merge left to one replica could be that
    # one's lie.
    return num_replicas == 2 or is_robust


class Averaging(ABC):
    """A way to keep replicas together, and how a rank joins it.

    Subclasses are dataclasses (base/settings.py).

    merge: a Byzantine-robust aggregator.
    """

    feedback: bool | Rate = True
    merge: RobustMerge | None = None

    @property
    def traits(self) -> Traits:
        return Traits()

    @property
    @abstractmethod
    def label(self) -> str:
        """The differences from the default, in words; may be empty."""

    @abstractmethod
    def join(self, replicas: Any) -> Exchange:
        """Open one rank's links to the other replicas and return its exchange.

        replicas: the object that the exchange is built from (features/replicas/replicas.py:
            Replicas).
        All ranks call it at the same time.
        """

    def check(self, layout: ClusterLayout) -> None:
        """Raise ConfigError for clouds, with their replicas and stages, that it cannot join."""
        if self.merge is not None:
            self.merge.check(layout.num_replicas)


@settings("strategy")
class Strategy:
    """The settings of `strategy`.

    name: the name by which a user calls the strategy.
    replicas: the number of copies of the pipeline, over which the clouds are spread in their
        order; null = one in each cloud.
    averaging: the method that keeps the copies together; null = none, for a single copy.
    """

    name: str = "pipeline"
    replicas: Positive | None = 1
    averaging: Averaging | None = None

    def __post_init__(self) -> None:
        if self.averaging is None and self.replicas != 1:
            raise ConfigError(
                f"strategy.replicas is {self.replicas}, but without strategy.averaging nothing "
                f"would bring the replicas together; {_CHOOSE}"
            )

    @property
    def label(self) -> str:
        more = self.averaging.label if self.averaging is not None else ""
        return f"{self.name} ({more})" if more else self.name

    @property
    def traits(self) -> Traits:
        return Traits() if self.averaging is None else self.averaging.traits

    def describe(self, layout: ClusterLayout) -> str:
        """Return the strategy in words, for the headline.

        layout: the layout as the strategy has arranged it.
        """
        if self.averaging is None:
            return self.label
        if layout.num_replicas == 1:
            return f"{self.label} (one replica, so nothing is averaged)"
        return f"{self.label}, {layout.num_replicas} replicas"

    def arrange(self, layout: ClusterLayout) -> ClusterLayout:
        """Return the clouds with their replicas and stages.

        Clouds that name their replicas themselves stay as they are. Raises ConfigError for a
        cluster that this strategy cannot use.
        """
        arranged = self._arranged(layout)
        if self.averaging is not None:
            self.averaging.check(arranged)
        return arranged

    def _arranged(self, layout: ClusterLayout) -> ClusterLayout:
        # Clouds with replicas of their own were arranged by the user.
        if layout.num_replicas > 1:
            return self._as_written(layout)
        if self.replicas == 1:
            return layout
        number = self.replicas or len(layout.clouds)
        # A remainder would leave clouds without work.
        if len(layout.clouds) % number:
            raise ConfigError(
                f"strategy.replicas={number} cannot be spread evenly over the "
                f"{len(layout.clouds)} clouds of cluster {layout.name!r}; use a divisor of "
                f"{len(layout.clouds)}, or say which cloud belongs to which replica "
                "(cluster.clouds.NAME.replica)"
            )
        per_replica = len(layout.clouds) // number
        # What clouds say of themselves, or were given by their position.
        held = {name: list(cloud.stages or ()) for name, cloud in layout.clouds.items()}
        # The stages are those that clouds take which name none.
        by_position = len(held) > 1 and [*held.values()] == [[k] for k in range(len(held))]
        is_whole = len(held) == 1  # one cloud holds all stages already
        gives = "the whole model" if per_replica == 1 else f"one of {per_replica} stages"
        # A rank of one stage contradicts a strategy that gives each rank all of them.
        for name, cloud in layout.clouds.items():
            if cloud.one_stage_per_rank:
                raise ConfigError(
                    f"strategy={self.name} gives every rank of a cloud {gives}, but "
                    f"cluster.clouds.{name} has one_stage_per_rank; leave that out, or give every "
                    "cloud its replica and its stages (cluster.clouds.NAME.replica)"
                )
        if not (by_position or is_whole):
            raise ConfigError(
                f"strategy={self.name} gives every rank of cluster {layout.name!r} {gives}, but "
                f"its clouds name their stages ({held}); leave stages out, or give every cloud "
                "its replica too (cluster.clouds.NAME.replica)"
            )
        # Each cloud is a replica: by position it had one stage, and now it has all.
        if per_replica == 1:
            stages = WHOLE_MODEL if by_position else tuple(range(layout.num_stages))
            return _with_stages(layout, stages=[stages] * number, per_replica=1)
        # The clouds of a replica stand behind each other, each with one stage.
        by_cloud = [(k % per_replica,) for k in range(len(layout.clouds))]
        return _with_stages(layout, stages=by_cloud, per_replica=per_replica)

    def _as_written(self, layout: ClusterLayout) -> ClusterLayout:
        num_replicas = layout.num_replicas
        if self.averaging is None:
            raise ConfigError(
                f"cluster.clouds holds {num_replicas} replicas of the pipeline, which strategy="
                f"{self.name} never averages; {_CHOOSE}, or leave replica out"
            )
        if self.replicas not in (None, num_replicas):
            raise ConfigError(
                f"strategy.replicas is {self.replicas}, but cluster.clouds.*.replica names "
                f"{num_replicas} replicas; make them equal"
            )
        # All ranks of a replica, by the stages that each holds together.
        together: dict[int, set[tuple[int, ...]]] = {}  # stages that share a rank, by replica
        for place in map(layout.placement, range(layout.num_ranks)):
            together.setdefault(place.replica, set()).add(tuple(sorted(place.stages)))
        # Ranks average with the one at the same place of another replica.
        for replica, groups in together.items():
            if groups != together[0]:
                raise ConfigError(
                    f"cluster.clouds: the ranks of replica {replica} hold stages "
                    f"{sorted(groups)}, those of replica 0 {sorted(together[0])}; a rank averages "
                    "with one that holds the same, so split every replica alike"
                )
        return layout


def _with_stages(
    layout: ClusterLayout, stages: Sequence[tuple[int, ...]], per_replica: int
) -> ClusterLayout:
    """Return the layout with each cloud's stages held by every rank of it.

    stages: the stages of each cloud in turn.
    """
    clouds: dict[str, Cloud] = {
        name: replace(cloud, stages=stages[k], replica=k // per_replica, one_stage_per_rank=False)
        for k, (name, cloud) in enumerate(layout.clouds.items())
    }
    return replace(layout, clouds=clouds)


class RankStages(NamedTuple):
    """The stages that one rank holds.

    cloud: its number.
    is_sharded: it holds a part of its stages.
    """

    cloud: int
    replica: int
    stages: Sequence[int]
    is_sharded: bool = False


@dataclass(frozen=True)
class ModelPlacement:
    """A record of who holds what, by which a run with other ranks resumes from a checkpoint.

    column: the column that applies, of the table in checkpoints/resume.py.
    merges_every: the number of steps after which all replicas are equal; 0 = only at last_step.
    labels: the labels of groups of settings.
    """

    column: str = "one-way"
    ranks: Sequence[RankStages] = ()
    merges_every: int = 0
    last_step: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def held(
        cls, layout: ClusterLayout, strategy: Strategy, last_step: int,
        labels: Mapping[str, str] = {},
    ) -> ModelPlacement:  # fmt: skip
        column = "pipeline"
        every = 1
        # Of a single replica nothing is merged, so its state is that of a pipeline.
        if layout.num_replicas > 1 and (averaging := strategy.averaging) is not None:
            column = averaging.traits.column
            every = averaging.traits.equal_every
        clouds = list(layout.clouds)
        placed = map(layout.placement, range(layout.num_ranks))
        ranks = [
            RankStages(
                cloud=clouds.index(p.cloud),
                replica=p.replica,
                stages=p.stages,
                is_sharded=layout.clouds[p.cloud].shard,
            )
            for p in placed
        ]
        return cls(
            column=column, ranks=ranks, merges_every=every, last_step=last_step, labels=labels
        )

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> ModelPlacement:
        ranks = [RankStages(cloud, replica, stages=tuple(stages), is_sharded=dealt)
                 for cloud, replica, stages, dealt in saved["ranks"]]  # fmt: skip
        return cls(**{**saved, "ranks": ranks})

    def holders(self, stage: int, replica: int) -> list[int]:
        """Return the ranks that hold a stage, in the order of their group ranks."""
        places = enumerate(self.ranks)
        return [r for r, p in places if stage in p.stages and p.replica == replica]

    def is_merged(self, step: int) -> bool:
        return step == self.last_step or (self.merges_every > 0 and step % self.merges_every == 0)

    @property
    def num_stages(self) -> int:
        return len({stage for place in self.ranks for stage in place.stages})

    @property
    def sharded_parts(self) -> set[tuple[int, int]]:
        """The sharded stages, as (stage, number of parts)."""
        return {
            (stage, len(self.holders(stage, place.replica)))
            for place in self.ranks if place.is_sharded for stage in place.stages
        }  # fmt: skip
