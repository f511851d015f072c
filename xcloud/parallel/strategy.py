"""How a job uses several clouds: the layers split over them, copies of the model in them, or both.

A *replica* is a copy of the whole pipeline. A strategy says how many there are, which clouds make
one, and how they stay together; it builds nothing and knows no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xcloud.base.checks import check_choice, check_int
from xcloud.base.errors import ConfigError
from xcloud.cluster.layout import Cloud, ClusterLayout
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.merging import Robust, check_merge, check_robust

WHOLE_MODEL = (0, 1)
"""The stages of a rank that holds all of a model whose cuts nobody asked for."""


@dataclass(frozen=True)
class GradientAveraging:
    """The gradients of every update are summed over the replicas, so that these stay equal.

    delay: 1 = an update uses the gradient of the one before, which crosses while the next is
        computed; another trajectory than with 0, which waits for it.
    feedback: what a lossy compressor leaves out of a gradient is added to the next one.
    merge: one that bears a bad cloud (parallel/merging.py); null = the sum. A gradient that is not
        finite then counts as zero.
    check_every: updates after which replicas compare digests of their parameters; 0 = only
        before the first.
    """

    delay: int = 0
    feedback: bool = True
    check_every: int = 100
    merge: Robust | None = None

    def __post_init__(self) -> None:
        check_robust(self.merge)
        check_choice("strategy.averaging.delay", self.delay, (0, 1))
        check_choice("strategy.averaging.feedback", self.feedback, (True, False))
        check_int("strategy.averaging.check_every", self.check_every, 0)

    @property
    def label(self) -> str:
        """Differences from the default, in words; may be empty."""
        return ", ".join(
            [*(["one update late"] if self.delay else []),
             *([] if self.feedback else ["without feedback"]),
             *([repr(self.merge)] if self.merge is not None else [])]
        )  # fmt: skip


@dataclass(frozen=True)
class Strategy:
    """The settings of `strategy`.

    name: as a user calls it. replicas: copies of the pipeline, to which the clouds are dealt in
    their order; null = one in each cloud. averaging: what keeps them together; null = nothing,
    for a single one.
    """

    name: str = "pipeline"
    replicas: int | None = 1
    averaging: GradientAveraging | LocalUpdates | None = None

    def __post_init__(self) -> None:
        if self.replicas is not None:
            check_int("strategy.replicas", self.replicas, 1)
        if self.averaging is not None and not isinstance(
            self.averaging, GradientAveraging | LocalUpdates
        ):
            raise ConfigError(
                "strategy.averaging must be a GradientAveraging, LocalUpdates or null, got "
                f"{self.averaging!r}"
            )
        if self.averaging is None and self.replicas != 1:
            raise ConfigError(
                f"strategy.replicas is {self.replicas}, but without strategy.averaging nothing "
                "would bring the replicas together; choose strategy=data_parallel, hybrid or "
                "local_updates"
            )

    @property
    def label(self) -> str:
        more = self.averaging.label if self.averaging is not None else ""
        return f"{self.name} ({more})" if more else self.name

    @property
    def is_apart(self) -> bool:
        """Whether each replica makes updates of its own."""
        return isinstance(self.averaging, LocalUpdates)

    @property
    def covers(self) -> int:
        """Updates that a replica's contribution to an averaging sums up."""
        return self.averaging.every if isinstance(self.averaging, LocalUpdates) else 1

    def most_contributions(self, num_updates: int) -> int:
        """Of a replica, with the same values in them, in so many updates."""
        if not isinstance(self.averaging, LocalUpdates):
            return num_updates
        full, rest = divmod(num_updates, self.averaging.every)
        return full + (rest > 0 or self.averaging.fragments > 1)  # the last step ends with one

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on where a cloud is late or lost."""
        return isinstance(self.averaging, LocalUpdates) and self.averaging.is_elastic

    def describe(self, layout: ClusterLayout) -> str:
        """For the headline. layout: as arranged."""
        if self.averaging is None:
            return self.label
        if layout.num_replicas == 1:
            return f"{self.label} (one replica, so nothing is averaged)"
        return f"{self.label}, {layout.num_replicas} replicas"

    def arrange(self, layout: ClusterLayout) -> ClusterLayout:
        """The clouds with their replicas and stages. Clouds that name their replicas themselves
        stay as they are. Raises ConfigError for a cluster that this strategy cannot use."""
        arranged = self._arranged(layout)
        if self.averaging is not None and self.averaging.merge is not None:
            check_merge(self.averaging.merge, arranged.num_replicas)
        if isinstance(self.averaging, LocalUpdates):
            _check_whole(arranged, self.averaging)
        return arranged

    def _arranged(self, layout: ClusterLayout) -> ClusterLayout:
        if layout.num_replicas > 1:
            return self._as_written(layout)
        number = len(layout.clouds) if self.replicas is None else self.replicas
        if number == 1 and self.replicas == 1:
            return layout
        if len(layout.clouds) % number:
            raise ConfigError(
                f"strategy.replicas={number} cannot be dealt evenly to the {len(layout.clouds)} "
                f"clouds of cluster {layout.name!r}; use a divisor of {len(layout.clouds)}, or "
                "say which cloud belongs to which replica (cluster.clouds.NAME.replica)"
            )
        per_replica = len(layout.clouds) // number
        by_position = _is_by_position(layout)
        if per_replica == 1:
            stages = WHOLE_MODEL if by_position else tuple(range(layout.num_stages))
            return _dealt(layout, [stages] * number, 1)
        if not by_position:
            held = {name: list(cloud.stages or ()) for name, cloud in layout.clouds.items()}
            raise ConfigError(
                f"strategy.replicas={number} deals the clouds of cluster {layout.name!r} to "
                f"pipelines of {per_replica}, but they name their stages ({held}); leave stages "
                "out, or give every cloud its replica too (cluster.clouds.NAME.replica)"
            )
        return _dealt(layout, [(k % per_replica,) for k in range(len(layout.clouds))], per_replica)

    def _as_written(self, layout: ClusterLayout) -> ClusterLayout:
        found = layout.num_replicas
        if self.averaging is None:
            raise ConfigError(
                f"cluster.clouds holds {found} replicas of the pipeline, which strategy="
                f"{self.name} never averages; choose strategy=data_parallel, hybrid or "
                "local_updates, or leave replica out"
            )
        if self.replicas not in (None, found):
            raise ConfigError(
                f"strategy.replicas is {self.replicas}, but cluster.clouds.*.replica names "
                f"{found} replicas; make them equal"
            )
        together: dict[int, set[tuple[int, ...]]] = {}  # stages that share a rank, by replica
        for rank in range(layout.num_ranks):
            place = layout.placement(rank)
            together.setdefault(place.replica, set()).add(tuple(sorted(place.stages)))
        for replica, groups in together.items():
            if groups != together[0]:
                raise ConfigError(
                    f"cluster.clouds: the ranks of replica {replica} hold stages "
                    f"{sorted(groups)}, those of replica 0 {sorted(together[0])}; a rank averages "
                    "with one that holds the same, so cut every replica alike"
                )
        return layout


def _check_whole(layout: ClusterLayout, settings: LocalUpdates) -> None:
    """Some settings need replicas of one cloud each, whose ranks hold all stages."""
    for name, cloud in layout.clouds.items():
        is_whole = len(cloud.stages or ()) == layout.num_stages
        if (not is_whole or cloud.one_stage_per_rank) and settings.needs_whole_replicas:
            raise ConfigError(
                f"{settings.needs_whole_replicas}: each rank must hold the whole model, but "
                f"those of cloud {name!r} hold parts; set strategy.replicas=null and "
                "one_stage_per_rank=false, or leave the setting out"
            )


def _is_by_position(layout: ClusterLayout) -> bool:
    """Whether the stages are those that clouds take which name none."""
    if len(layout.clouds) == 1:
        return False
    return [cloud.stages for cloud in layout.clouds.values()] == [
        (k,) for k in range(len(layout.clouds))
    ]


def _dealt(
    layout: ClusterLayout, stages: list[tuple[int, ...]], per_replica: int
) -> ClusterLayout:
    """stages: of each cloud in turn. Where a cloud held a stage in each rank it now holds all of
    its stages in every rank."""
    clouds: dict[str, Cloud] = {
        name: replace(cloud, stages=stages[k], replica=k // per_replica, one_stage_per_rank=False)
        for k, (name, cloud) in enumerate(layout.clouds.items())
    }
    return replace(layout, clouds=clouds)
