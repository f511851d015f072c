"""Settings that fit alone and not together: what a run of so many steps never comes to. Such a run
may be meant, so it is told and not refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from xcloud.base.walk import Node, walk
from xcloud.comm.compression_plans import Phased
from xcloud.job.job import Job
from xcloud.models.pretraining import Descent
from xcloud.pipeline.settings import Optimizer

INTERVALS = ("every", "evaluate_every", "check_every")
"""Names of settings that count updates between two times of something, 0 being never."""


def misfits(job: Job) -> list[str]:
    """Return what of the settings a run never comes to, a sentence each, with the keys."""
    return [line for node in walk(job) for line in _of(node, job.max_steps)]


def _of(node: Node, max_steps: int) -> Iterator[str]:
    ends = f"training.max_steps={max_steps}"
    path = node.path
    value = node.value
    # Its phases are compressors, none of which counts steps.
    if isinstance(value, Phased):
        node.is_closed = True
        # A phase ends where the next one begins.
        for name, follows in pairwise(value.phases):
            until = value.phases[name].until_step
            if until is not None and until >= max_steps:
                yield (
                    f"{path}.{follows} never begins: {path}.{name}.until_step={until}, and {ends}"
                )
    # type() and not isinstance(): True is no number of steps.
    elif node.name in INTERVALS and type(value) is int and value > max_steps:
        yield f"{path}={value} is more than {ends}: it comes at the end, or never"
    # The largest rate that the run reaches, at one end or the other.
    elif isinstance(value, Optimizer) and value.warmup_steps > max_steps:
        first = value.learning_rate_at(1, max_steps)
        yield _in_warmup(
            value, path, max(first, value.learning_rate_at(max_steps, max_steps)), ends
        )
    elif isinstance(value, Descent) and 0 < value.steps < value.warmup_steps:
        reached = max(value.learning_rate_at(0), value.learning_rate_at(value.steps - 1))
        yield _in_warmup(value, path, reached, f"{path}.steps={value.steps}")


def _in_warmup(rule: Optimizer | Descent, path: str, reached: float, ends: str) -> str:
    return (
        f"the run ends in its warm-up: it reaches {100 * reached / rule.learning_rate:.2g} % of "
        f"{path}.learning_rate={rule.learning_rate:g}, as {path}.warmup_steps={rule.warmup_steps} "
        f"is more than {ends}"
    )
