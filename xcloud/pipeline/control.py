"""Small messages between clouds besides the pipeline: norms, barriers, reports.

A star around rank 0; for norms, one in each replica of the pipeline around the first of its
leaders. One rank of each stage (its leader) speaks for the stage. Everything here is framed,
delayed and counted like the rest, under "other".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from xcloud.base.errors import FrameError, LinkTimeout
from xcloud.net.failure_detector import FailureDetector
from xcloud.net.frame import Frame, Kind, MessageKey, Tensors, TensorSpec
from xcloud.net.link_end import ReceivingEnd, SendingEnd

REPORT_CAPACITY_BYTES = 1 << 18
REPORT_CARRIES = ("report lines, see reports",)
_LOOK_S = 0.1  # at a barrier rank 0 looks at one link so long, then at the next
_NORMS = ("squared gradient norm of each stage, NaN if not finite",)
_SUMMED = ("sum of the squared gradient norms", "whether to save or stop after this step uint8")
_CODE = TensorSpec(shape=(1,), dtype=torch.uint8)
_NUMBER = ("which of the last steps all ranks report int64",)


class Signal(IntEnum):
    """The control signal of rank 0: what every rank does after an update, before the next one."""

    GO_ON = 0
    CHECKPOINT = 1  # save what the run can go on from
    STOP = 2  # save it, and end


class Reply(NamedTuple):
    """The reply of rank 0 to the leaders, and of these to their stages."""

    total: float
    signal: Signal = Signal.GO_ON


@dataclass(frozen=True)
class StageSums:
    """The sums of one number per stage over the stages of a replica.

    leader_of: the leader of each stage of this rank's replica.
    out, incoming: links to and from the first leader, or, in that one, to and from every other.
    """

    rank: int
    leader_of: tuple[int, ...]
    out: Mapping[int, SendingEnd] = field(default_factory=dict)
    incoming: Mapping[int, ReceivingEnd] = field(default_factory=dict)
    overdue_s: float = 0.0

    @property
    def leaders(self) -> list[int]:
        """The first of them adds up, and gives the signal."""
        return sorted({*self.leader_of})

    def sum_over_stages(
        self, step: int, values: Mapping[int, float], signal_at: Callable[[int], Signal]
    ) -> Reply:
        """Return the sum of one number per stage, the same bits in every leader, with the control
        signal that the first leader gives. Only leaders call it.

        values: stage -> number, for the stages that this leader speaks for.
        """
        self.report(step, values=values)
        return self.total(step, values=values, signal_at=signal_at)

    def report(self, step: int, values: Mapping[int, float]) -> None:
        """Send this leader's numbers to the first leader, who keeps its own."""
        first = self.leaders[0]
        if self.rank != first:
            # NaN for the stages of others: a norm that nobody fills in may never count as finite.
            norms = torch.full((len(self.leader_of),), torch.nan, dtype=torch.float64)
            for stage, value in values.items():
                norms[stage] = value
            self.out[first].send(MessageKey(Kind.NORM, step), (norms,), _NORMS)

    def total(
        self, step: int, values: Mapping[int, float], signal_at: Callable[[int], Signal]
    ) -> Reply:
        """Return the sum of what all leaders have reported of this step."""
        key = MessageKey(Kind.NORM, step)
        num_stages = len(self.leader_of)
        first, *others = self.leaders
        if self.rank != first:
            return reply_of(self.incoming[first].recv(key, overdue_s=self.overdue_s), first=first)
        collected = dict(values)
        for leader in others:
            received = self.incoming[leader].recv(key, overdue_s=self.overdue_s)
            # Only what the leader speaks for is taken: another owner's rank may send anything in
            # the rest.
            of_stages = check_norms(received, num_stages=num_stages, leader=leader)
            own = (stage for stage, rank in enumerate(self.leader_of) if rank == leader)
            collected.update({stage: of_stages[stage] for stage in own})
        # In the order of the stages: floating-point sums depend on it. A NaN norm must survive,
        # so a stage that nobody reported counts as NaN too.
        total = sum((collected.get(stage, float("nan")) for stage in range(num_stages)), 0.0)
        # Asked once the norms are there, so what rank 0 decides holds for this update in every
        # rank.
        signal = signal_at(step)
        parts = [torch.tensor([total], dtype=torch.float64)]
        if signal is not Signal.GO_ON:
            parts.append(torch.tensor([signal], dtype=torch.uint8))
        for leader in others:
            self.out[leader].send(key, tuple(parts), _SUMMED[: len(parts)])
        return Reply(total, signal)


def check_norms(parts: Tensors, num_stages: int, leader: int) -> list[float]:
    """Return a leader's squared norms, NaN or 0 and more. Raises FrameError for anything else."""
    found = [*map(TensorSpec.of, parts)]
    expected = [TensorSpec(shape=(num_stages,), dtype=torch.float64)]
    norms: list[float] = parts[0].tolist() if found == expected else []
    if not norms or any(norm < 0 for norm in norms):
        raise FrameError(
            f"rank {leader} sent {found} for the norms of {num_stages} stages, or some below 0; "
            f"expected {expected}"
        )
    return norms


def reply_of(parts: Tensors, first: int) -> Reply:
    """Return the reply in a message: the sum, and what to do. Raises FrameError for anything
    else."""
    specs = [*map(TensorSpec.of, parts)]
    code = int(Signal.GO_ON)
    fits = specs[:1] == [TensorSpec(shape=(1,), dtype=torch.float64)] and specs[1:] in (
        [],
        [_CODE],
    )
    if fits and len(parts) == 2:
        code = int(parts[1])
    if not fits or code not in [*Signal]:
        raise FrameError(f"rank {first} sent {specs} and {code} for a sum of norms")
    return Reply(float(parts[0]), Signal(code))


def number_of(parts: Tensors) -> int:
    """Return the number that comes with a barrier, 0 for none. Raises FrameError for anything
    else."""
    specs = [*map(TensorSpec.of, parts)]
    if specs not in ([], [TensorSpec(shape=(1,), dtype=torch.int64)]):
        raise FrameError(f"{specs} came to a barrier of all ranks, expected one number or none")
    return int(parts[0]) if parts else 0


@dataclass(eq=False)
class Control:
    """The small messages between rank 0 and every other rank.

    out, incoming: links to and from rank 0, or, in rank 0, to and from every other rank.
    detector: the failure detector of this rank, which knows what other ranks are alive.
    """

    rank: int
    out: dict[int, SendingEnd]
    incoming: dict[int, ReceivingEnd]
    overdue_s: float
    detector: FailureDetector
    _num_barriers: int = field(default=0, init=False)
    listener: Callable[[int, Frame], None] | None = field(default=None, init=False)
    """What is called with each message about a checkpoint and who sent it, in a link's thread. It
    is set before the first step: nobody sends any until then."""

    def barrier(
        self, ranks: Collection[int] | None = None, number: int = 0, claim: bool = False
    ) -> int:
        """Return when every rank of the job, or of `ranks`, has come here. All of these call it,
        and rank 0 is one of them.

        number: a number that rank 0 gives to the others; returned in all ranks.
        claim: a wish of this rank that the number be 1, if rank 0 gives none.

        A rank is waited for as long as it sends heartbeats. Raises LinkTimeout naming one that
        gives none, LinkClosed naming one that is gone.
        """
        self._num_barriers += 1
        key = MessageKey(Kind.BARRIER, self._num_barriers)
        started_s = time.monotonic()
        if self.rank != 0:
            # A claim travels with the arrival and the number with the answer, so neither costs a
            # message.
            claimed = (torch.tensor([1]),) if claim else ()
            self.out[0].send(key, claimed, _NUMBER[: len(claimed)])
        missing = peers = sorted(self.out if ranks is None else self.out.keys() & ranks)
        came: dict[int, Tensors] = {}
        while missing:  # in turn, so that the end of any of them is seen at once
            for peer in missing:
                if (parts := self._come(peer, key=key, started_s=started_s)) is not None:
                    came[peer] = parts
            missing = [peer for peer in missing if peer not in came]
        if self.rank != 0:
            return number_of(came[0]) if 0 in came else 0
        claims = [claim, *(number_of(parts) != 0 for parts in came.values())]
        number = number or int(any(claims))
        given = (torch.tensor([number]),) if number else ()
        for peer in peers:
            self.out[peer].send(key, given, _NUMBER[: len(given)])
        return number

    def _come(self, peer: int, key: MessageKey, started_s: float) -> Tensors | None:
        """Return the message of a rank that has come, None for one that has not yet."""
        try:
            return self.incoming[peer].recv(key, overdue_s=_LOOK_S)
        except LinkTimeout:
            record = self.detector.peers[peer]
            waited_s = time.monotonic() - started_s
            # It may export or evaluate for an hour. What counts is that its heartbeats come.
            if record.left_s(waited_s, overdue_s=self.overdue_s) > 0:
                return None
            raise LinkTimeout(
                f"rank {peer} has not come to the barrier of all ranks, and sent no heartbeat for "
                f"{min(record.silent_s, waited_s):.0f} s. Is that rank stopped, or its link down?"
            ) from None

    def receive(self, peer: int, frame: Frame) -> None:
        if self.listener is None:
            raise FrameError(f"{frame.key} of rank {peer} came before the first step")
        self.listener(peer, frame)


def send_report(link: SendingEnd, lines: bytes) -> None:
    """Send whole report lines, at most REPORT_CAPACITY_BYTES; does not wait."""
    assert len(lines) <= REPORT_CAPACITY_BYTES
    data = torch.frombuffer(bytearray(lines), dtype=torch.uint8)
    link.send(MessageKey(Kind.REPORT), (data,), REPORT_CARRIES)
