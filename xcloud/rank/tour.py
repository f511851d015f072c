"""One rank's part in a planner's trial run: schedule and compression change between updates as a
Tour says, and what the rank did in each is left in a file. Measures nothing that a run does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from xcloud.comm.compression_plans import Selectable
from xcloud.contracts.model import Stage
from xcloud.job.experiment import Experiment
from xcloud.parallel.one_forward_one_backward import can_wait
from xcloud.parallel.schedule import Schedule
from xcloud.plan.settings import Autopilot, Tour
from xcloud.rank.autopilot import RunPilot, Switching
from xcloud.rank.memory import SavedTensors, bytes_of
from xcloud.rank.typical_step import timeline_events
from xcloud.record.reporter import Reporter
from xcloud.training.trainer import Trainer
from xcloud.wire.wiring import Wiring

FACTS_FILE = "trial-rank{}.json"


class StageFacts:
    """What is known of a stage beside its times, by its first forward: bytes of weights, and of
    what a sample leaves in memory until its backward, or until its weights' gradients."""

    def __init__(self, stage: Stage) -> None:
        trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        self.table: dict[str, Any] = {
            "parameter_bytes": bytes_of([*stage.parameters(), *stage.buffers()]),
            "trained": {name: list(p.shape) for name, p in trained.items()},
            "trained_bytes": bytes_of(trained.values()),
            "activation_bytes": 0.0,
            "put_off_bytes": 0.0,
        }
        self._saved = SavedTensors()
        self._waiting: dict[int, int] = {}  # bytes, by address
        self._hooks = [
            stage.register_forward_pre_hook(lambda module, given: self._saved.__enter__()),
            stage.register_forward_hook(self._end),
            *(part.register_forward_hook(self._wait) for part in can_wait(stage)),
        ]

    def _wait(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        """A layer whose weights may wait keeps its input and its output's gradient."""
        for tensor in (given[0], output):
            self._waiting[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    def _end(self, module: nn.Module, given: tuple[Any, ...], output: object) -> None:
        self._saved.__exit__(None, None, None)
        num_samples = max(1, len(given[1]["ids"]))
        self.table["activation_bytes"] = self._saved.num_bytes / num_samples
        self.table["put_off_bytes"] = sum(self._waiting.values()) / num_samples
        for hook in self._hooks:
            hook.remove()


class TourPilot(Switching):
    def __init__(
        self,
        tour: Tour,
        trainer: Trainer,
        file: Path,
        compression: Selectable,
        schedules: Sequence[Schedule],
        wiring: Wiring,
    ) -> None:
        super().__init__(compression, schedules, wiring, trainer.use_schedule)
        self._tour, self._trainer, self._file = tour, trainer, file
        self._clock = trainer.pipeline.clock
        self._stages = {n: StageFacts(stage) for n, stage in trainer.pipeline.stages.items()}
        assert self._clock.messages is not None
        self._messages = self._clock.messages
        self._messages.from_step = 1 + len(tour.legs)  # the first turn warms caches up

    def follow(self, step: int, choice: int) -> None:
        super().follow(step, self._tour.leg(step + 1))

    def finish(self) -> None:
        feed = self._trainer.feed
        steps = [[*timeline_events(step, self._messages)] for step in self._clock.recorded]
        found = {
            "steps": steps,
            "stages": {number: facts.table for number, facts in self._stages.items()},
            "num_samples": feed.plan.num_samples,
            "tokens_per_sample": feed.work.weight / feed.work.num_samples if feed.weigh else 0.0,
        }
        self._file.write_text(json.dumps(found), encoding="utf-8")


def pilot_of(
    autopilot: Autopilot,
    job: Experiment,
    trainer: Trainer,
    wiring: Wiring,
    reporter: Reporter,
    run_dir: Path,
) -> Switching:
    """What changes the rank's compression and schedule while it trains."""
    assert isinstance(job.compression, Selectable)
    if isinstance(autopilot, Tour):
        file = run_dir / FACTS_FILE.format(trainer.pipeline.rank)
        return TourPilot(
            autopilot, trainer, file, job.compression, job.schedules, wiring
        )  # fmt: skip
    pilot = RunPilot(
        autopilot, job.compression, job.schedules, job.cluster, wiring,
        trainer.pipeline.clock, reporter, trainer.use_schedule,
    )  # fmt: skip
    if trainer.pipeline.rank == 0:
        pilot.prepare(job, trainer.pipeline.device)
    return pilot
