"""The leak meter as a feature: it reports after a run what the clouds could recover of others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from xcloud.features.leak_meter.observers import LeakObservers, leak_observers, meter_of, observed
from xcloud.job.job import PipelineJob
from xcloud.job.needs import FeatureUse, known_last_step, one_update_at_a_time
from xcloud.pipeline.pipeline import BoundaryPorts
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.role import RankContext


class LeakMeasurement(Feature):
    """An observation of the last updates, and attacks on what was observed."""

    uses = (
        FeatureUse(
            setting="security.meter",
            asked=lambda job: job.security.meter is not None,
            why={
                one_update_at_a_time: "observes whole updates",
                known_last_step: "observes the last updates of a run, which it must know",
            },
            without="set security/meter=none",
        ),
    )

    left_out_of_trials = MappingProxyType({"security.meter": None})

    def describe(self, job: PipelineJob) -> str:
        return "" if job.cluster.crosses_clouds else "leak meter: off (one cloud)"

    def measured(self, job: PipelineJob, run_dir: Path) -> Mapping[str, Any]:
        meter = meter_of(job)
        return {} if meter is None else meter.measure(run_dir)

    def at_rank(self, context: RankContext[PipelineJob]) -> FeatureAtRank | None:
        return None if meter_of(context.job) is None else LeakMeterAtRank(context, self)


class LeakMeterAtRank(FeatureAtRank):
    """The observers of one rank."""

    _observers: LeakObservers

    def ports(self, ports: dict[int, BoundaryPorts], built: BuiltRank) -> dict[int, BoundaryPorts]:
        self._observers = leak_observers(built.context, data=built.data, stages=built.stages)
        # `watch` is read when the exchange is built, which comes behind the ports.
        if self._observers.averaged is not None:
            self.watch = self._observers.averaged.received
        return observed(ports, observer=self._observers.observer, ends=built.wiring.ends)

    def observer(self, built: BuiltRank, trainer: Trainer) -> LeakObservers:
        return self._observers
