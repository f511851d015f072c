"""Choose compression and schedule in each rank while the run goes on.

A rank measures, rank 0 decides (rule.py), and every rank hears of the choice right behind the norm
of an update, before anything of the next one is computed or sent. So all switch between the same
two updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.comm.channel import Boundary
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable
from xcloud.comm.state import Stateful
from xcloud.features.autopilot.rule import DIRECTIONS, Forecast, Measured, Rule
from xcloud.job.job import PipelineJob
from xcloud.net.frame import Kind, MessageKey, Tensors, TensorSpec
from xcloud.net.link_profile import LinkProfile, line_bytes
from xcloud.pipeline.hook import StepReport
from xcloud.pipeline.line_meter import LineMeters
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.wiring import Wiring
from xcloud.rank.switching import Switching
from xcloud.record.reporter import Reporter
from xcloud.simulator.codec_timer import time_codec
from xcloud.simulator.costs import Direction

KINDS = {"forward": Kind.ACTIVATION, "backward": Kind.GRADIENT}
MAX_ROWS = 4096  # of a tensor that codecs are timed on: what they take is counted for each byte
_FREE_BITS_PER_S = 1e15  # of a line that kept no message waiting: as good as none at all
_MEASURED = ("seconds of the main thread, bytes, messages, seconds and delay of the line float64",)
_CHOSEN = ("the autopilot's choice uint8",)


class RunPilot(Switching):
    """The hook of a rank that measures, decides (rank 0) and switches while a run goes on."""

    name = "autopilot"

    def __init__(
        self,
        job: PipelineJob,
        wiring: Wiring,
        trainer: Trainer,
        reporter: Reporter,
        forecast: Forecast | None,
    ) -> None:
        super().__init__(job, wiring, trainer)
        assert job.autopilot is not None
        self._settings = job.autopilot
        self._rule = Rule(job.autopilot)
        self._reporter = reporter
        self.forecast = forecast
        self._sums = trainer.sums
        layout = job.cluster
        crossed = filter(layout.leaves_cloud, range(layout.num_stages - 1))
        # A boundary's forward row stands right before its backward row: _since relies on it.
        self._rows = {way: row for row, way in enumerate(product(crossed, DIRECTIONS), 1)}
        self._spent_s = torch.zeros(2, dtype=torch.float64)  # in all updates before this one
        self._last: dict[int, Tensor] = {}
        self._last_step = 0
        self._next: int | None = None

    def after_exchange(self, step: int) -> None:
        sums = self._sums
        key = MessageKey(kind=Kind.CHOICE, step=step)
        if not self._is_look(step) or sums.rank not in sums.leader_of:
            return
        mine = self.measured()
        (first, *others) = sums.leaders
        # Measures travel ahead of a leader's norm of the update, over the same link, and the
        # choice (after_update) behind rank 0's reply to it.
        if sums.rank != first:
            sums.out[first].send(key, (mine,), _MEASURED)
            return
        told = {
            leader: sums.incoming[leader].recv(key, overdue_s=sums.overdue_s) for leader in others
        }
        measured = {leader: like(mine, parts, sender=leader) for leader, parts in told.items()}
        self._next = self.decide(step, measured={first: mine, **measured})

    def after_update(self, step: int, report: StepReport) -> None:
        self._spent_s += self._of_this_update()
        if not self._is_look(step):
            return
        sums = self._sums
        key = MessageKey(kind=Kind.CHOICE, step=step)
        in_force = self._in_force.choice
        (first, *others) = sums.leaders
        choice = torch.tensor([in_force if self._next is None else self._next], dtype=torch.uint8)
        if sums.rank == first:
            for leader in others:
                sums.out[leader].send(key, (choice,), _CHOSEN)
        elif sums.rank in others:
            parts = sums.incoming[first].recv(key, overdue_s=sums.overdue_s)
            choice = like(choice, parts, sender=first)
        # The ranks that share a stage have no link to rank 0; their leader passes the choice on.
        for stage in self._trainer.stages.values():
            choice = stage.group.from_leader(choice)
        if int(choice) != in_force:
            self.switch(step, choice=int(choice))
        # Lines are idle: each has delivered all that it had of this step.
        for channel in self._wiring.boundaries.wan_sends:
            wan = self._layout.wan_between(channel.identity.sender, peer=channel.identity.receiver)
            if wan is not None and wan.is_metered:
                channel.link.say_alive()  # a probe, see LineMeter

    def measured(self) -> Tensor:
        """Return this rank's sums since the start: a row for itself, then one for each way."""
        # Row 0: seconds of the main thread, and those that it computed. Others: bytes, messages,
        # seconds on the line, delay. Rank 0 takes differences between two looks.
        sums = torch.zeros(1 + len(self._rows), 4, dtype=torch.float64)
        sums[0, :2] = self._spent_s + self._of_this_update()
        # The sender knows the seconds of an emulated line, the receiver those of a real one.
        for channel in self._wiring.boundaries.wan_sends:
            row = sums[self._rows[channel.identity.boundary, channel.identity.direction]]
            kind = KINDS[channel.identity.direction]
            sent = channel.link.record
            row[0] += sent.num_bytes[kind]
            row[1] += sent.num_messages[kind]
            row[2] += sent.line_s[kind]
            row[3] = sent.latency_s
        meters = self._wiring.boundaries.shared(LineMeters)
        for identity, line_s in meters.line_s.items():
            row = sums[self._rows[identity.boundary, identity.direction]]
            row[2] += line_s
            row[3] = meters.by_sender[identity.sender].delay_s  # latency + difference of clocks
        return sums

    def decide(self, step: int, measured: Mapping[int, Tensor]) -> int | None:
        """Return, in rank 0, what all use from the next update on; None: as before.

        measured: the measures of each rank.
        """
        before = self._last
        self._last = dict(measured)
        updates = step - self._last_step
        self._last_step = step
        if not before:  # the first look of this attempt
            return None
        assert self.forecast is not None
        grown = self._since(before, updates=updates)
        in_force = self._in_force.choice
        since_step = self._selection.since_step
        predicted_s = self.forecast.step_s(grown, in_force)
        choice = self._rule.choose(
            step, in_force=in_force, since_step=since_step, predicted_s=predicted_s
        )
        if choice is not None:
            self._tell(step, choice=choice, predicted_s=predicted_s, by=grown)
        return choice

    def _remembered(self) -> dict[str, Stateful | None]:
        return {**super()._remembered(), "rule": self._rule, "forecast": self.forecast}

    def _is_look(self, step: int) -> bool:
        """Return whether all look at the line after this update.

        The first update is one, so that the next look has something to compare with.
        """
        return step == 1 or step % self._settings.every == 0

    def _of_this_update(self) -> Tensor:
        clock = self._trainer.pipeline.clock
        clock.settle()
        return torch.tensor([sum(clock.seconds.values()), clock.seconds["compute_s"]])

    def _since(self, before: Mapping[int, Tensor], updates: int) -> Measured:
        """Return what an update has taken on average since the last look."""
        layout = self._layout
        leaders = layout.leader_of()  # by stage; a rank may lead several, and shares its seconds
        grown = {rank: now - before[rank] for rank, now in self._last.items()}
        compute_s = [float(grown[rank][0, 1]) / updates / leaders.count(rank) for rank in leaders]
        # Whoever is at neither end of a boundary tells nothing of it.
        told = torch.stack([*grown.values()]).sum(0)
        delays_s = torch.stack([*self._last.values()]).sum(0)[:, 3].tolist()
        sent: dict[tuple[int, str], float] = {}
        sums: dict[tuple[str, str], Any] = defaultdict(float)
        latency_s: dict[tuple[str, str], float] = {}
        for (boundary, direction), row in self._rows.items():
            here = layout.stage_cloud(boundary)
            there = layout.stage_cloud(boundary + 1)
            way = (here, there) if direction == "forward" else (there, here)
            if not told[row, 1]:
                continue  # no message: samples that are kept, or a gradient that never returns
            sent[boundary, direction] = float(told[row, 0] / told[row, 1])
            sums[way] += told[row, :3]  # several boundaries may share the line of two clouds
            if direction == "backward":  # there and back what clocks differ by drops out
                both_s = max(0.0, delays_s[row - 1] + delays_s[row])
                latency_s |= dict.fromkeys([way, way[::-1]], both_s / 2)
        lines = {}
        for way, own in sums.items():
            bandwidth = line_bandwidth(*own.tolist())
            lines[way] = LinkProfile(bandwidth, latency_s=latency_s.get(way, 0.0))
        return Measured(
            step_s=float(grown[0][0, 0]) / updates,
            compute_s=compute_s,
            sent_bytes=sent,
            lines=lines,
        )

    def _tell(self, step: int, choice: int, predicted_s: Sequence[float], by: Measured) -> None:
        names = list(self._compression.choices)
        if len(self._schedules) > 1:
            names = [f"{name}, {s.label}" for s in self._schedules for name in names]
        before = self._in_force.choice
        rates = ", ".join(
            f"{here} to {there} {line.bandwidth_bits_per_s / 1e6:.1f} Mbit/s"
            for (here, there), line in by.lines.items()
        )
        better = f"{predicted_s[choice]:.3f} s a step instead of {predicted_s[before]:.3f}"
        self._reporter.event(
            "autopilot", now=True, step=step, choice=names[choice], before=names[before],
            reason=f"{rates}: {better}",
            predicted_s={n: round(s, 6) for n, s in zip(names, predicted_s, strict=True)},
        )  # fmt: skip


def like(mine: Tensor, parts: Tensors, sender: int) -> Tensor:
    """Return the one tensor that another rank sent.

    Raises FrameError for anything but finite numbers of the same kind and shape.
    """
    specs = [*map(TensorSpec.of, parts)]
    expected = [TensorSpec.of(mine)]
    if specs != expected or not parts[0].isfinite().all():
        raise FrameError(
            f"rank {sender} sent {specs} to the autopilot, not all finite; expected {expected}"
        )
    return parts[0]


def line_bandwidth(num_bytes: float, num_messages: float, line_s: float) -> float:
    """Return the bandwidth of a line, on which packets have headers."""
    of_each = line_bytes(round(num_bytes / num_messages))
    return min(8 * num_messages * of_each / max(line_s, 1e-15), _FREE_BITS_PER_S)


def forecast_of(job: PipelineJob, device: torch.device) -> Forecast:
    """Build the forecast. The codecs of all choices are measured on this device, which stands for
    all."""
    assert isinstance(job.compression, Selectable)
    layout = job.cluster
    rows = -(-job.training.batch_size // job.num_pieces)
    crossed = [(n, own) for n, own in job.boundaries.items() if layout.leaves_cloud(n)]
    codecs = []
    for choice in job.compression.choices.values():
        costs = {}
        for n, boundary in crossed:
            for direction, own in codec_costs(boundary, choice, num_samples=rows, device=device):
                costs[n, direction] = own
        codecs.append(costs)
    return Forecast(
        schedules=job.schedules,
        layout=layout,
        num_passes=job.training.accumulate_steps,
        codecs=codecs,
    )


def codec_costs(
    boundary: Boundary, choice: Compression, num_samples: int, device: torch.device
) -> Iterator[tuple[str, Direction]]:
    """Yield the costs of a choice's codecs at a boundary, by direction.

    num_samples: the samples of a micro-batch.
    """
    for direction, fields, compressor in (
        ("forward", boundary.fields, choice.forward),
        ("backward", boundary.gradient_fields, choice.backward),
    ):
        compressed = [field for field in fields if field.is_compressed]
        if compressed:
            # The largest tensors that can come: texts of one batch are as long as they are, and
            # the forecast scales what is timed here by bytes.
            most = max(f.max_rows(num_samples, boundary.max_rows_per_sample) for f in compressed)
            specs = [field.spec(min(MAX_ROWS, most)) for field in compressed]
            is_gradient = direction == "backward"
            yield direction, time_codec(compressor, specs, device, is_gradient=is_gradient)
