"""The leak meter as a feature: after a run it tells what the clouds could recover of others."""

from __future__ import annotations

from xcloud.job.job import PipelineJob
from xcloud.rank.feature import Feature


class LeakMeasurement(Feature):
    """An observation of the last updates, and attacks on what was observed."""

    def is_used(self, job: PipelineJob) -> bool:
        return job.security.meter is not None

    def describe(self, job: PipelineJob) -> str:
        return "" if job.cluster.crosses_clouds else "leak meter: off (one cloud)"
