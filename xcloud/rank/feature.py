"""What a feature is to the rest of the package: a folder in features/ and a line in
feature_list.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xcloud.job.job import PipelineJob
from xcloud.job.needs import Use


class Feature:
    """Something that a job may use beyond a plain pipeline. A feature overrides what it has.

    uses: the ways in which settings ask for it, with what it then needs of the job.
    """

    uses: Sequence[Use] = ()

    def is_used(self, job: PipelineJob) -> bool:
        """Return whether the job uses the feature."""
        return any(use.asked(job) for use in self.uses)

    def adjusted(self, job: PipelineJob) -> Mapping[str, Any]:
        """Return the settings of the job that the feature sets before anything is checked."""
        return {}

    def check(self, job: PipelineJob) -> None:
        """Raise ConfigError if the job asks for the feature and lacks what it needs."""
        for use in self.uses:
            if not use.reads_model:
                use.check(job)

    def check_model(self, job: PipelineJob) -> None:
        """Raise ConfigError for what only files of the model can show."""
        for use in self.uses:
            if use.reads_model:
                use.check(job)

    def describe(self, job: PipelineJob) -> str:
        """Return what the headline of the job says of the feature, which it uses."""
        return ""
