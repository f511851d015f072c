"""Settings that fit alone and not together: what a run of so many steps never comes to. Such a run
may be meant, so it is told and not refused."""

from __future__ import annotations

from itertools import pairwise

from xcloud.base.terminal import say
from xcloud.base.walk import walk
from xcloud.comm.compression_plans import Phased
from xcloud.job.job import Job
from xcloud.models.pretraining import Descent
from xcloud.pipeline.settings import Optimizer

INTERVALS = ("every", "evaluate_every", "check_every")
"""Names of settings that count updates between two times of something, 0 being never."""


def announce(job: Job) -> None:
    """Print which job is run, and what of its settings the run never comes to."""
    lines = [job.headline, *misfits(job)]
    say("\n".join(lines))


def misfits(job: Job) -> list[str]:
    """Return what of the settings a run never comes to, a sentence each, with the keys."""
    found = []
    max_steps = job.max_steps
    ends = f"training.max_steps={max_steps}"
    for node in walk(job):
        path = node.path
        value = node.value
        rates: list[float] = []  # at both ends of a run that ends in its warm-up
        # Its phases are compressors, none of which counts steps.
        if isinstance(value, Phased):
            node.is_closed = True
            # A phase ends where the next one begins.
            for name, follows in pairwise(value.phases):
                until = value.phases[name].until_step
                if until is not None and until >= max_steps:
                    never = f"{path}.{follows} never begins"
                    found.append(f"{never}: {path}.{name}.until_step={until}, and {ends}")
        # type() and not isinstance(): True is no number of steps.
        elif node.name in INTERVALS and type(value) is int and value > max_steps:
            found.append(f"{path}={value} is more than {ends}: it comes at the end, or never")
        elif isinstance(value, Optimizer) and value.warmup_steps > max_steps:
            last = ends
            rates = [value.learning_rate_at(step, max_steps) for step in (1, max_steps)]
        elif isinstance(value, Descent) and 0 < value.steps < value.warmup_steps:
            last = f"{path}.steps={value.steps}"
            rates = [value.learning_rate_at(step) for step in (0, value.steps - 1)]
        # The largest rate that the run reaches, at one end or the other.
        if rates:
            found.append(
                f"the run ends in its warm-up: it reaches "
                f"{100 * max(rates) / value.learning_rate:.2g} % of "
                f"{path}.learning_rate={value.learning_rate:g}, as "
                f"{path}.warmup_steps={value.warmup_steps} is more than {last}"
            )
    return found
