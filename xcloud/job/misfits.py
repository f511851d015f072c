"""Settings that fit alone and not together: what a run of so many steps never comes to. Such a run
may be meant, so it is told and not refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

from xcloud.comm.compression_plans import Phased
from xcloud.job.job import Job
from xcloud.models.pretraining import Descent
from xcloud.pipeline.settings import Optimizer

INTERVALS = ("every", "evaluate_every", "check_every")
"""Names of settings that count updates between two times of something, 0 being never."""


def misfits(job: Job) -> list[str]:
    """Return what of the settings a run never comes to, a sentence each, with the keys."""
    return [line for path, one in _every(job, "") for line in _of(one, path, job.max_steps)]


def _every(settings: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all settings in a job's, by path."""
    if isinstance(settings, Phased):
        yield path, settings
    elif is_dataclass(settings):
        yield path, settings
        for one in fields(settings):
            yield from _every(getattr(settings, one.name, None), f"{path}.{one.name}".lstrip("."))
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _every(value, f"{path}.{key}")


def _of(settings: Any, path: str, max_steps: int) -> Iterator[str]:
    ends = f"training.max_steps={max_steps}"
    rule: Optimizer | Descent | None = None
    steps = max_steps
    if isinstance(settings, Optimizer):
        rule = settings
        reached = max(
            rule.learning_rate_at(step, max_steps)
            for step in {1, min(max(1, rule.warmup_steps), max_steps), max_steps}
        )
    elif isinstance(settings, Descent) and settings.steps:
        rule = settings
        steps = settings.steps
        ends = f"{path}.steps={steps}"
        reached = max(
            rule.learning_rate_at(step) for step in {0, min(rule.warmup_steps, steps - 1)}
        )
    if rule is not None and rule.warmup_steps > steps:
        share = 100 * reached / rule.learning_rate
        yield (
            f"the run ends in its warm-up: it reaches {share:.2g} % of {path}.learning_rate="
            f"{rule.learning_rate:g}, as {path}.warmup_steps={rule.warmup_steps} is more than "
            f"{ends}"
        )
    for one in () if isinstance(settings, Phased) else fields(settings):
        value = getattr(settings, one.name)
        if one.name in INTERVALS and type(value) is int and value > max_steps:
            yield f"{path}.{one.name}={value} is more than {ends}: it comes at the end, or never"
    if isinstance(settings, Phased):
        names = list(settings.phases)
        for name, follows in pairwise(names):
            until = settings.phases[name].until_step
            if until is not None and until >= max_steps:
                yield (
                    f"{path}.{follows} never begins: {path}.{name}.until_step={until}, and {ends}"
                )
