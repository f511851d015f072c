"""Run a planner's trial: change schedule and compression between updates as a Tour says, and leave
what each rank did in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xcloud.base.settings import NotNegative, settings
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable
from xcloud.comm.devices import scratch_bytes
from xcloud.contracts.model import Stage
from xcloud.job.job import PipelineJob
from xcloud.pipeline.hook import StepReport
from xcloud.pipeline.one_forward_one_backward import can_wait
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.wiring import Wiring
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.reports import (
    MemoryMeter,
    SavedTensors,
    WorkSpace,
    bytes_of,
    optimizer_bytes,
    timeline_events,
)
from xcloud.rank.switching import Switching, check_choices

FACTS_FILE = "trial-rank{}.json"


class TourAtRank(FeatureAtRank):
    """A trial's tour in one rank."""

    feature: Tour

    def hook(self, built: BuiltRank, trainer: Trainer) -> TourPilot:
        context = self.context
        file = context.run_dir / FACTS_FILE.format(context.rank)
        return TourPilot(
            context.job, built.wiring, trainer, tour=self.feature, file=file, memory=built.memory
        )


@settings("tour")
class Tour(Feature):
    """The choices that a trial goes through in turn, whatever it measures: a feature that is given
    as a hook.

    choices: the compressions by name, the run's own first.
    schedules_tried: the schedules, as their settings, the run's own first.
    legs: the numbers of the choices (schedule x number of compressions + compression), one for
        each update in turn, again and again.
    """

    choices: Mapping[str, Compression]
    schedules_tried: Sequence[Any] = ()
    legs: Sequence[NotNegative] = (0,)

    at_work = TourAtRank

    def leg(self, step: int) -> int:
        """Return the choice of an update, from 1 on."""
        return self.legs[(step - 1) % len(self.legs)]

    def adjusted(self, job: PipelineJob) -> Mapping[str, Any]:
        choices = Selectable(choices=self.choices, chosen_by="trial")
        return {"compression": choices, "schedules": list(self.schedules_tried)}

    def check(self, job: PipelineJob) -> None:
        check_choices(job, own=replace(job, hooks={}), by="the trial")


class TourPilot(Switching):
    """The hook of a rank that changes schedule and compression between updates as a Tour says.

    The first turn warms caches up. The update after it, which is one with the job's own schedule
    and compression, tells how much memory is taken beside what is kept. Later ones are recorded.
    """

    name = "tour"

    def __init__(
        self,
        job: PipelineJob,
        wiring: Wiring,
        trainer: Trainer,
        *,
        tour: Tour,
        file: Path,
        memory: MemoryMeter,
    ) -> None:
        super().__init__(job, wiring, trainer)
        self._tour = tour
        self._file = file
        self._clock = trainer.pipeline.clock
        self._memory = memory
        self._work_space = WorkSpace(memory.device)
        # The update after the first turn, which is of leg 0 again: the job's own choice.
        self._weighed = 1 + len(self._tour.legs)
        self._stages = {n: StageMeter(stage) for n, stage in trainer.pipeline.stages.items()}
        assert self._clock.messages is not None
        self._messages = self._clock.messages
        # What is not recorded is not remembered, either.
        self._messages.from_step = self._weighed + 1

    def before_update(self, step: int) -> None:
        if step == self._weighed:
            # The peak of memory is taken over this update alone, when nothing is built any more.
            self._work_space.begin()

    def after_update(self, step: int, report: StepReport) -> None:
        if step == self._weighed:
            self._work_space.end()
        # Every rank goes by the number of the step, so that all switch at once without a message.
        self.switch(step, choice=self._tour.leg(step + 1))

    def finish(self) -> None:
        feed = self._trainer.feed
        rank = self._trainer.pipeline.rank
        moments = optimizer_bytes(self._trainer.optimizers)
        held = self._memory.describe(self._trainer.pipeline.stages.values(), moments)
        # What a plan counts by kind itself; what is left is the program and its work space.
        planned = held["parameters"] + held["gradients"] + held["optimizer"] + scratch_bytes()
        head = {"event": "timeline", "rank": rank, "cloud": self._layout.cloud_of(rank)}
        facts = {
            "events": [
                head | part
                for step in self._clock.recorded
                for part in timeline_events(step, messages=self._messages)
            ],
            "stages": {number: meter.facts for number, meter in self._stages.items()},
            "trained": {f"{n}.{name}": shape for n, meter in self._stages.items()
                        for name, shape in meter.trained.items()},
            "num_samples": feed.plan.num_samples,
            "tokens_per_sample": feed.work.num_tokens / max(1, feed.work.num_own),
            "other_bytes": self._memory.bytes_beside(planned) + self._work_space.num_bytes,
        }  # fmt: skip
        self._file.write_text(json.dumps(facts), encoding="utf-8")


class StageMeter:
    """The sizes of a stage, known after its first forward in training.

    facts: the bytes of weights, and of what a sample leaves in memory until its backward, or until
        its weights' gradients.
    trained: the shapes of the trained weights, by name.
    """

    def __init__(self, stage: Stage) -> None:
        trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        self.trained = {name: list(p.shape) for name, p in trained.items()}
        self.facts = {
            "parameter_bytes": bytes_of([*stage.parameters(), *stage.buffers()]),
            "trained_bytes": bytes_of(trained.values()),
            "activation_bytes": 0.0,
            "deferred_bytes": 0.0,
        }
        self._saved = SavedTensors()
        self._waiting: dict[int, int] = {}  # bytes, by address
        self._hooks = [
            stage.register_forward_pre_hook(self._begin),
            stage.register_forward_hook(self._end),
            *(part.register_forward_hook(self._wait) for part in can_wait(stage)),
        ]

    def _begin(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():  # not in the evaluation before training
            self._saved.__enter__()

    def _wait(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        """Note what a layer keeps whose weights may wait: its input and its output's gradient."""
        if not torch.is_grad_enabled():
            return
        for tensor in (given[0], output):
            # By address: two layers that read one input keep it once.
            self._waiting[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    def _end(self, module: nn.Module, given: tuple[Any, ...], output: object) -> None:
        if not torch.is_grad_enabled():
            return
        self._saved.__exit__(None, None, None)
        num_samples = max(1, len(given[1]["ids"]))
        self.facts["activation_bytes"] = self._saved.num_bytes / num_samples
        self.facts["deferred_bytes"] = sum(self._waiting.values()) / num_samples
        # Measured once, in the first micro-batch of training: later steps pay nothing for it.
        for hook in self._hooks:
            hook.remove()
