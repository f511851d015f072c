"""One rank's part in choosing compression and schedule while the run goes on: it measures, rank 0
decides (plan/autopilot.py), and the choice reaches every rank with the norm of an update, before
anything of the next one is computed or sent. So all switch between the same two updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from xcloud.cluster.frame import Kind
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link_profile import line_bytes
from xcloud.comm.boundary import Boundary
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable, Selection
from xcloud.comm.state import (
    MEMORY,
    State,
    Stateful,
    join_states,
    load_states,
    split_state,
    states_of,
    whole_number,
)
from xcloud.comm.step_clock import StepClock
from xcloud.job.experiment import Experiment
from xcloud.parallel.control import NO_CHOICE
from xcloud.parallel.part import Part
from xcloud.parallel.schedule import Schedule
from xcloud.plan.autopilot import DIRECTIONS, Forecast, Measured, Rule
from xcloud.plan.codec_timer import time_codec
from xcloud.plan.costs import Direction
from xcloud.plan.settings import Autopilot
from xcloud.record.reporter import Reporter
from xcloud.wire.further_ends import LineMeters
from xcloud.wire.wiring import Wiring

KINDS = {"forward": Kind.ACTIVATION, "backward": Kind.GRADIENT}
MOST_ROWS = 4096  # of a tensor that codecs are timed on: what they take is counted for each byte
_SUMS = 3  # of each boundary and direction: bytes, messages, seconds on the line; and its delay
_PER_WAY = _SUMS + 1


class Switching(Part):
    """Carries out choices: from the next update on another compression, another schedule. A
    choice is schedule x number of compressions + compression."""

    name = "autopilot"

    def __init__(
        self,
        compression: Selectable,
        schedules: Sequence[Schedule],
        wiring: Wiring,
        use_schedule: Callable[[Schedule], None],
    ) -> None:
        """schedules: to choose from, the run's own first. use_schedule: see Trainer."""
        self._compression, self._schedules = compression, schedules
        self._wiring, self._use_schedule = wiring, use_schedule
        self._choice = 0

    def follow(self, step: int, choice: int) -> None:
        if choice != NO_CHOICE:
            self._choice = choice
            shape, compression = divmod(choice, len(self._compression.choices))
            self._wiring.boundaries.shared(Selection).switch(compression, step + 1)
            self._use_schedule(self._schedules[shape])

    def state_dict(self) -> State:
        """With another compression or cluster it begins again with its first choice."""
        own: State = {"choice": self._choice}
        return join_states({MEMORY: own | states_of(self._stateful)})

    def load_state_dict(self, state: State) -> None:
        state = split_state(state, (MEMORY,), "the autopilot")[MEMORY]
        load_states(self._stateful, state, "the autopilot", ["choice"])
        self._choice = whole_number(state, "choice")
        shape, compression = divmod(self._choice, len(self._compression.choices))
        in_force = self._wiring.boundaries.shared(Selection).choice
        if shape >= len(self._schedules) or compression != in_force:
            raise ValueError(
                f"the autopilot was saved with choice {self._choice}, which it has not now"
            )
        self._use_schedule(self._schedules[shape])

    @property
    def _stateful(self) -> dict[str, Stateful]:
        return {"switches": self._wiring.boundaries.shared(Selection)}


class RunPilot(Switching):
    """Measures are sums since the start: [busy_s of the main thread, compute_s, then by boundary
    and direction bytes, messages, line_s and the delay]; rank 0 takes differences between two
    looks.

    The sender tells line_s of an emulated line, the receiver that of a real one (LineMeter).
    delay: the latency of a message; of a real line + what both clocks differ by."""

    def __init__(
        self,
        settings: Autopilot,
        compression: Selectable,
        schedules: Sequence[Schedule],
        layout: ClusterLayout,
        wiring: Wiring,
        clock: StepClock,
        reporter: Reporter,
        use_schedule: Callable[[Schedule], None],
    ) -> None:
        super().__init__(compression, schedules, wiring, use_schedule)
        self._settings, self._layout = settings, layout
        self._clock, self._reporter = clock, reporter
        self._boundaries = [s for s in range(layout.num_stages - 1) if layout.leaves_cloud(s)]
        self._busy_s = self._compute_s = 0.0
        self._last: dict[int, Tensor] = {}
        self._last_step = 0
        self._rule = Rule(settings)
        self.forecast: Forecast | None = None  # in rank 0

    def prepare(self, job: Experiment, device: torch.device) -> None:
        """Measure the codecs of all choices. In rank 0, before the first step; the speed of its
        machine stands for all."""
        rows = -(-job.training.batch_size // job.num_pieces)
        codecs = [
            dict(
                entry
                for number in self._boundaries
                for entry in codec_costs(number, job.boundaries[number], choice, rows, device)
            )
            for choice in self._compression.choices.values()
        ]
        passes = job.training.accumulate_steps
        self.forecast = Forecast(self._schedules, self._layout, passes, codecs)

    def measured(self, step: int) -> Tensor | None:
        clock = self._clock
        clock.settle()
        self._compute_s += clock.seconds["compute_s"]
        self._busy_s += sum(clock.seconds.values())
        if not self._is_look(step):
            return None
        found = torch.zeros(2 + len(self._boundaries) * len(DIRECTIONS) * _PER_WAY).double()
        found[0], found[1] = self._busy_s, self._compute_s
        for channel in self._wiring.boundaries.wan_sends:
            at = self._place(channel.identity.boundary, channel.identity.direction)
            kind, sent = KINDS[channel.identity.direction], channel.link.record
            sums = (sent.num_bytes[kind], sent.num_messages[kind], sent.line_s[kind])
            found[at : at + _SUMS] += torch.tensor(sums, dtype=torch.float64)
            found[at + _SUMS] = sent.latency_s
        meters = self._wiring.boundaries.shared(LineMeters)
        for identity, line_s in meters.line_s.items():
            at = self._place(identity.boundary, identity.direction)
            found[at + 2] += line_s
            found[at + _SUMS] = meters.by_sender[identity.sender].delay_s
        return found

    def decide(self, step: int, measured: Mapping[int, Tensor]) -> int | None:
        before, self._last = self._last, dict(measured)
        updates, self._last_step = step - self._last_step, step
        if not before:  # the first look of this attempt
            return None
        assert self.forecast is not None
        grown = self._since(before, updates)
        predicted_s = self.forecast.step_s(grown, self._choice)
        since_step = self._wiring.boundaries.shared(Selection).since_step
        choice = self._rule.choose(step, self._choice, since_step, predicted_s)
        if choice is not None:
            self._tell(step, self._choice, choice, predicted_s, grown)
        return choice

    def follow(self, step: int, choice: int) -> None:
        super().follow(step, choice)
        if self._is_look(step):  # lines are idle: each has delivered all that it had of this step
            for channel in self._wiring.boundaries.wan_sends:
                both = channel.identity.sender, channel.identity.receiver
                wan = self._layout.wan_between(*both)
                if wan is not None and wan.is_metered:
                    channel.link.say_alive()  # a probe, see LineMeter

    @property
    def _stateful(self) -> dict[str, Stateful]:
        parts = {**super()._stateful, "rule": self._rule}
        return parts if self.forecast is None else {**parts, "forecast": self.forecast}

    @property
    def _names(self) -> list[str]:
        """Of all choices; the schedule is named where there are several."""
        compressions = self._compression.names
        if len(self._schedules) == 1:
            return compressions
        return [f"{name}, {s.label}" for s in self._schedules for name in compressions]

    def _is_look(self, step: int) -> bool:
        """The first update is one, so that the next look has something to compare with."""
        return step == 1 or step % self._settings.every == 0

    def _place(self, boundary: int, direction: str) -> int:
        way = self._boundaries.index(boundary) * len(DIRECTIONS) + DIRECTIONS.index(direction)
        return 2 + _PER_WAY * way

    def _since(self, before: Mapping[int, Tensor], updates: int) -> Measured:
        layout = self._layout
        grown = {rank: now - before[rank] for rank, now in self._last.items()}
        leaders = [layout.ranks_of(stage)[0] for stage in range(layout.num_stages)]
        compute_s = [float(grown[rank][1]) / updates / leaders.count(rank) for rank in leaders]
        sent: dict[tuple[int, str], float] = {}
        sums: dict[tuple[str, str], Tensor] = {}
        latency_s: dict[tuple[str, str], float] = {}
        for boundary in self._boundaries:
            clouds = layout.stage_cloud(boundary), layout.stage_cloud(boundary + 1)
            delays_s = 0.0
            for direction in DIRECTIONS:
                at = self._place(boundary, direction)
                # What each end of the boundary has told.
                ends = [leaders[boundary], leaders[boundary + 1]]
                told = sum((grown[rank][at : at + _SUMS] for rank in ends), torch.zeros(_SUMS))
                delays_s += sum(float(self._last[rank][at + _SUMS]) for rank in ends)
                if not told[1]:
                    continue
                sent[boundary, direction] = float(told[0] / told[1])
                way = clouds if direction == "forward" else (clouds[1], clouds[0])
                sums[way] = sums.get(way, torch.zeros(_SUMS)) + told
            # There and back, so what the clocks differ by drops out.
            if (boundary, "backward") in sent:
                for way in (clouds, (clouds[1], clouds[0])):
                    latency_s[way] = max(0.0, delays_s / 2)
        rates = {way: _bits_per_s(*told.tolist()) for way, told in sums.items()}
        return Measured(float(grown[0][0]) / updates, compute_s, sent, rates, latency_s)

    def _tell(
        self, step: int, before: int, choice: int, predicted_s: Sequence[float], found: Measured
    ) -> None:
        names = self._names
        rates = ", ".join(
            f"{here} to {there} {rate / 1e6:.1f} Mbit/s"
            for (here, there), rate in found.bits_per_s.items()
        )
        reason = (
            f"{rates}: {predicted_s[choice]:.3f} s a step instead of {predicted_s[before]:.3f}"
        )
        self._reporter.event(
            "autopilot", now=True, step=step, choice=names[choice], before=names[before],
            reason=reason,
            predicted_s={n: round(s, 6) for n, s in zip(names, predicted_s, strict=True)},
        )  # fmt: skip


def _bits_per_s(num_bytes: float, num_messages: float, line_s: float) -> float:
    """Of a line, on which packets have headers."""
    of_each = line_bytes(round(num_bytes / num_messages))
    return 8 * num_messages * of_each / line_s if line_s else math.inf


def codec_costs(
    number: int, boundary: Boundary, choice: Compression, num_samples: int, device: torch.device
) -> Iterator[tuple[tuple[int, str], Direction]]:
    """num_samples: of a micro-batch."""
    both = zip(
        DIRECTIONS,
        (boundary.fields, boundary.gradient_fields),
        (choice.forward, choice.backward),
        strict=True,
    )
    for direction, fields, compressor in both:
        floating = [field for field in fields if field.dtype.is_floating_point]
        if floating:
            most = max(f.max_rows(num_samples, boundary.max_rows_per_sample) for f in floating)
            rows = min(MOST_ROWS, most)
            yield (number, direction), time_codec(compressor, floating, rows, device)
