"""The watch over what arrives from other clouds as a feature."""

from __future__ import annotations

from collections.abc import Mapping

from xcloud.features.sentinel.settings import OnDeparture
from xcloud.features.sentinel.watch import Sentinel, WatchedEnd, watched
from xcloud.job.job import PipelineJob
from xcloud.pipeline.pipeline import BoundaryPorts
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank


class _AtRank(FeatureAtRank):
    _ends: Mapping[str, WatchedEnd]

    def ports(self, ports: dict[int, BoundaryPorts], built: BuiltRank) -> dict[int, BoundaryPorts]:
        # The watch has a state, so that a run can go on with another setting.
        seen, self._ends = watched(ports, ends=built.wiring.ends)
        return ports if on_departure(built.context.job) == "ignore" else seen

    def hook(self, built: BuiltRank, trainer: Trainer) -> Sentinel:
        job = built.context.job
        return Sentinel(
            ends=self._ends,
            layout=job.cluster,
            reporter=built.context.reporter,
            on_departure=on_departure(job),
        )


class DepartureWatch(Feature):
    """Wherever a boundary between stages leaves a cloud, an eye on sudden departures."""

    at_work = _AtRank

    def is_used(self, job: PipelineJob) -> bool:
        layout = job.cluster
        return any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1))


def on_departure(job: PipelineJob) -> OnDeparture:
    """Return what the job does at a departure, by its setting or else by who owns its clouds."""
    default: OnDeparture = "ignore" if job.cluster.is_on_one_machine else "alarm"
    return job.security.on_departure or default
