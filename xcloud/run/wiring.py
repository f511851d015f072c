"""Joins the ranks: process groups, links and channels of one rank, from the layout.

Every border has one process group for each direction, so that both directions flow at once; the
small messages besides go through a third kind of group, in a star around rank 0. Compression and
the emulated link act where a border leaves a cloud; inside a cloud messages go as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from xcloud.cluster.frame import Frame, Kind
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link import InLink, LinkStats, OutLink
from xcloud.cluster.liveness import Heartbeat
from xcloud.cluster.transport import Transport
from xcloud.cluster.wire_record import LinkRecord
from xcloud.comm.border import Border, BorderField
from xcloud.comm.channel import PLAIN, Codec, Codecs, ReceiveChannel, SendChannel
from xcloud.comm.draws import ChannelId
from xcloud.comm.memory import State, join_states, split_state
from xcloud.comm.per_border import PerBorder
from xcloud.comm.phases import Compression, Phased
from xcloud.comm.step_clock import StepClock
from xcloud.parallel.control import REPORT_CAPACITY_BYTES, Control, note_ages
from xcloud.parallel.pipeline import BorderPorts
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.schedule import Schedule, most_in_flight
from xcloud.run.ends import FRAME_SLACK_BYTES, Ends
from xcloud.security.defences import Defences

_CONTROL_AHEAD = 8  # small messages under way on a control link: a norm, reports
_FORWARD_AHEAD = 32
"""Messages that may be under way forward where no gradient holds back the sender: an evaluation's
pieces, and training over a border that no gradient crosses. More wait in the sender's queue."""


@dataclass
class Wiring:
    """All ends that one rank holds. wan_*: those that leave its cloud."""

    ends: Ends
    ports: dict[int, BorderPorts] = field(default_factory=dict)
    lanes: dict[int, RankGroup] = field(default_factory=dict)
    control: Control | None = None
    wan_forward: list[SendChannel] = field(default_factory=list)
    wan_backward: list[SendChannel] = field(default_factory=list)

    @property
    def wan_records(self) -> list[LinkRecord]:
        return self.ends.records

    @property
    def wan_stats(self) -> list[LinkStats]:
        return [link.stats for link in self.ends.wan_outs]

    @property
    def is_emulated(self) -> bool:
        return self.ends.is_emulated

    @property
    def channels(self) -> dict[str, SendChannel | ReceiveChannel]:
        """Every channel that ends here, by its identity in words."""
        return {
            str(channel.identity): channel
            for ports in self.ports.values()
            for ends in (
                ports.forward_out, ports.forward_in, ports.backward_out, ports.backward_in
            )
            for channel in ends.values()
        }  # fmt: skip

    def state_dict(self) -> State:
        """What the channels carry from step to step; links and counters begin anew."""
        return join_states({name: end.state_dict() for name, end in self.channels.items()})

    def load_state_dict(self, state: State) -> None:
        """The state of the same rank in the same experiment; ValueError otherwise."""
        channels = self.channels
        for name, part in split_state(state, channels, "a rank's channels").items():
            channels[name].load_state_dict(part)

    def alive(self) -> AbstractContextManager[object]:
        """While the block lasts the other ranks are told that this one lives. For whatever may
        take long outside a training step."""
        if self.control is None:
            return nullcontext()
        return Heartbeat(self.ends.layout.liveness.interval_s, self.control.say_alive)

    def meet(self) -> None:
        """Wait until every rank has come here; see Control.meet."""
        if self.control is not None:
            self.control.meet()

    def close(self) -> None:
        """Deliver everything, hear every peer's goodbye, as long as it gives signs of life."""
        with self.alive():
            self.ends.close()


def wire(
    transport: Transport,
    layout: ClusterLayout,
    borders: dict[int, Border],
    compression: Compression | Phased | PerBorder,
    max_samples: int,
    device: torch.device,
    clock: StepClock,
    run_dir: Path,
    on_report: Callable[[Frame], None],
    schedule: Schedule,
    defences: Defences | None = None,
    *,
    seed: int,
) -> Wiring:
    """Build this rank's ends. Every rank calls it at the same time with the same arguments.

    borders: by the stage before the border. max_samples: of any micro-batch. on_report: called in
    rank 0, in a background thread, for each report of another rank. schedule: says how many
    messages a link must be able to hold. defences: noise on what leaves a cloud that holds the
    first stage (forward) or the last one (backward). seed: of the experiment, for compressors that
    draw random numbers.
    """
    ends = Ends(transport, layout, run_dir, clock.messages)
    wiring = Wiring(ends)
    if layout.num_ranks == 1:
        wiring.ports = {stage: BorderPorts(border) for stage, border in borders.items()}
        wiring.lanes = {stage: RankGroup.alone() for stage in range(layout.num_stages)}
        return wiring
    builder = _Builder(ends, layout, wiring, seed)
    builder.join_lanes()
    builder.join_control(on_report)
    for stage, border in sorted(borders.items()):
        builder.join_border(
            stage, border, compression.at_border(stage), max_samples, device, clock, schedule
        )
    for stage, ports in wiring.ports.items():
        ports.crosses_clouds = layout.stage_cloud(stage) != layout.stage_cloud(stage + 1)
        if defences is not None:
            ports.defences = defences.at(stage, layout.stage_cloud, layout.num_stages - 1)
    return wiring


@dataclass
class _Builder:
    ends: Ends
    layout: ClusterLayout
    wiring: Wiring
    seed: int

    @property
    def rank(self) -> int:
        return self.ends.rank

    def join_lanes(self) -> None:
        """One group for the ranks of each stage that has several."""
        for stage in range(self.layout.num_stages):
            lanes = self.ends.group(self.layout.ranks_of(stage))
            if lanes is not None:
                self.wiring.lanes[stage] = lanes

    def join_control(self, on_report: Callable[[Frame], None]) -> None:
        everyone = range(self.layout.num_ranks)
        self.ends.line("control", everyone)
        peers = everyone[1:] if self.rank == 0 else everyone[:1]
        capacity = REPORT_CAPACITY_BYTES + FRAME_SLACK_BYTES
        handlers = (
            {Kind.REPORT: on_report}
            if self.rank == 0
            else {Kind.ALIVE: partial(note_ages, self.ends.lives)}
        )
        window = self.ends.window(_CONTROL_AHEAD, capacity)
        out: dict[int, OutLink] = {}
        incoming: dict[int, InLink] = {}
        for peer in peers:
            overdue_s = self.layout.overdue_s(self.rank, peer, capacity)
            out[peer] = self.ends.out("control", peer, capacity, window, overdue_s=overdue_s)
            incoming[peer] = self.ends.incoming(
                "control", peer, capacity, window, handlers,
                advice=self.layout.overdue_advice(self.rank, peer),
            )  # fmt: skip
        overdue_s = max(self.layout.overdue_s(self.rank, peer, 1024) for peer in peers)
        self.wiring.control = Control(
            self.rank, self.layout.leaders, out, incoming, overdue_s, self.ends.lives
        )

    def join_border(
        self,
        stage: int,
        border: Border,
        compression: Compression | Phased,
        max_samples: int,
        device: torch.device,
        clock: StepClock,
        schedule: Schedule,
    ) -> None:
        """Channels between the ranks of `stage` and those of the next one."""
        before, behind = self.layout.ranks_of(stage), self.layout.ranks_of(stage + 1)
        everyone = sorted({*before, *behind})
        for direction in ("forward", "backward"):  # a line each, so that both flow at once
            self.ends.line(f"{stage}.{direction}", everyone)
        if self.rank not in everyone:
            return
        ports = BorderPorts(border)
        self.wiring.ports[stage] = ports
        crosses = self.layout.stage_cloud(stage) != self.layout.stage_cloud(stage + 1)
        # Which lanes meet: micro-batch i joins lane i mod n before with lane i mod n behind.
        meets = [
            (self.layout.owner(stage, i), self.layout.owner(stage + 1, i))
            for i in range(len(before) * len(behind))
        ]
        actions = schedule.actions(stage, self.layout.num_stages)
        in_flight = most_in_flight(actions, lambda i: meets[i % len(meets)])
        for direction in ("forward", "backward"):
            line = f"{stage}.{direction}"
            fields = border.fields if direction == "forward" else border.gradient_fields
            if not fields:
                continue
            codecs = _codecs(compression, direction) if crosses else _plain
            frame, capacity = _frame_bytes(
                fields, codecs(), max_samples, border.max_rows_per_sample
            )
            if direction == "forward":
                start = sum(spec.num_bytes for spec in border.start)
                capacity = max(capacity, start + FRAME_SLACK_BYTES)
            for a, b in sorted(set(meets)):
                sender, receiver = (a, b) if direction == "forward" else (b, a)
                if sender == receiver:
                    continue
                identity = ChannelId(self.seed, stage, direction, sender, receiver)
                under_way = in_flight[a, b]
                if direction == "forward":
                    under_way = max(under_way, _FORWARD_AHEAD)
                window = self.ends.window(under_way, frame)
                if sender == self.rank:
                    overdue_s = self.layout.overdue_s(self.rank, receiver, capacity)
                    link = self.ends.out(line, receiver, capacity, window, stage, overdue_s)
                    channel = SendChannel(link, fields, codecs, clock, identity)
                    (ports.forward_out if direction == "forward" else ports.backward_out)[
                        receiver
                    ] = channel
                    if crosses:
                        wan = self.wiring.wan_forward, self.wiring.wan_backward
                        wan[direction == "backward"].append(channel)
                elif receiver == self.rank:
                    inlink = self.ends.incoming(
                        line, sender, capacity, window, border=stage,
                        advice=self.layout.overdue_advice(self.rank, sender),
                    )  # fmt: skip
                    overdue_s = self.layout.overdue_s(self.rank, sender, capacity)
                    (ports.forward_in if direction == "forward" else ports.backward_in)[sender] = (
                        ReceiveChannel(inlink, fields, codecs, clock, identity, device, overdue_s)
                    )


def _plain() -> Codecs:
    return Codecs([(None, PLAIN)])


def _codecs(compression: Compression | Phased, direction: str) -> Callable[[], Codecs]:
    """Makes fresh codecs: every channel has its own state."""
    phases: list[tuple[int | None, Compression]] = (
        [(phase.until_step, phase.compression) for phase in compression.phases.values()]
        if isinstance(compression, Phased)
        else [(None, compression)]
    )

    def make() -> Codecs:
        return Codecs(
            [
                (until, Codec(c.forward, c.forward_memory))
                if direction == "forward"
                else (until, Codec(c.backward, c.backward_memory))
                for until, c in phases
            ]
        )

    return make


def _frame_bytes(
    fields: tuple[BorderField, ...], codecs: Codecs, max_samples: int, max_rows: int
) -> tuple[int, int]:
    """Bytes of the frame that codecs make of the most rows, which bounds what is under way, and of
    the longest frame that can come, so that receives can wait before it is known."""
    frame = capacity = FRAME_SLACK_BYTES
    for entry in fields:
        rows = max_samples * (max_rows if entry.rows == "counted" else 1)
        spec = entry.spec(rows)
        coded = codecs.max_bytes(spec) if spec.is_floating else spec.num_bytes
        frame += coded
        capacity += max(spec.num_bytes, coded)
    return frame, capacity
