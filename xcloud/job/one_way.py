"""OneWayExperiment: the one frozen object that describes a one-way job, in which several clouds
feed one with integers. Its file is read and checked like any experiment's (config.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from pydantic import SkipValidation

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.cluster.one_way_layout import OneWayLayout
from xcloud.contracts.one_way_parts import OneWayModel
from xcloud.job.job import Job
from xcloud.parallel.one_way import Feed
from xcloud.record.one_way_summary import OneWayStatistics
from xcloud.training.settings import Checkpoints, OnDivergence


@settings("training")
class OneWayTraining:
    """max_steps: updates of the consumer. batches_per_step: producers' batches in one update, over
    all ranks of the consumer; how large a batch is, the model says.
    on_divergence, max_skips_in_a_row: as of a pipeline's Training, for the consumer's updates and
    each producer's own. A producer whose forward is not finite has no batch to send: it stops.
    checkpoint: in steps of the consumer."""

    max_steps: Positive
    batches_per_step: Positive
    on_divergence: OnDivergence = "stop"
    max_skips_in_a_row: Positive = 10
    checkpoint: Checkpoints = field(default_factory=Checkpoints)


@settings(kw_only=True)
class OneWayExperiment(Job):
    """Who feeds whom, how it trains and what is written down. Raises ConfigError for settings that
    do not fit together.

    follow_up: overrides of an experiment that runs when this one has finished, on what it left, in
    its run folder; none if empty. Points of a sweep have none.
    """

    model: SkipValidation[OneWayModel]
    cluster: OneWayLayout
    training: OneWayTraining
    feed: Feed = field(default_factory=Feed)
    follow_up: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.autopilot is not None:
            raise ConfigError(
                "autopilot chooses the compression of a pipeline's boundaries, and a one-way "
                "job has none; set autopilot=off"
            )
        if not hasattr(self.model, "max_payload_bytes"):
            raise ConfigError(
                f"model: a {type(self.model).__name__} cannot feed; a one-way job needs a "
                "OneWayModel (xcloud/contracts/one_way_parts.py)"
            )
        fitted = self.feed.fitted(self.cluster, self.training.batches_per_step)
        object.__setattr__(self, "feed", fitted)

    def statistics(self) -> OneWayStatistics:
        return OneWayStatistics(self.cluster)

    @property
    def compression_in_force(self) -> str:
        """Nothing is compressed: only packed integers cross."""
        return "ids" if self.cluster.crosses_clouds else "off"

    @property
    def variant(self) -> str:
        return self.feed.order

    @property
    def schedule_label(self) -> str:
        return f"order {self.feed.order}, run-ahead {self.feed.run_ahead}"

    @property
    def _described(self) -> Sequence[str]:
        return self.model.describe(), self.cluster.describe(), self.schedule_label

    # Ids cross as they are: a defence would have to change the text itself, and what they reveal
    # is no matter of measuring (docs/one-way-jobs.md). So no defences and no leak meter.

    @property
    def essential_ranks(self) -> frozenset[int]:
        if self.feed.on_dead == "stop":
            return frozenset(range(self.cluster.num_ranks))
        return frozenset(self.cluster.ranks_in(self.cluster.consumer))

    @property
    def may_report(self) -> Mapping[str, frozenset[int]]:
        consumers, nobody = frozenset(range(self.cluster.num_consumers)), frozenset[int]()
        feeding = frozenset(range(self.cluster.num_ranks)) - consumers
        return {"loss": nobody, "quality": nobody, "step": consumers, "fed": feeding}

    def refused_with(self, ranks: frozenset[int]) -> frozenset[int]:
        """Whole producers, where feed.min_producers says that the others suffice."""
        layout, wanted = self.cluster, self.feed.min_producers
        lost = [name for name in layout.clouds if ranks & set(layout.ranks_in(name))]
        suffice = wanted is not None and len(layout.producers) - len(lost) >= wanted
        if self.feed.on_dead == "stop" or layout.consumer in lost or not suffice:
            return frozenset()
        return frozenset(rank for name in lost for rank in layout.ranks_in(name))

    def check(self) -> None:
        self.model.check(self.cluster.producers)

    def next_command(self, run_dir: Path) -> str | None:
        return None if self.follow_up else self.model.next_command(run_dir)
