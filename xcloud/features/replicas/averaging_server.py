"""Averaging where a cloud may be late, leave and come back. Replica 0, the averaging server, must
stay: it merges what has come in time and answers each replica for itself, so that nobody waits
for a third.

Every message says which merge its replica knows last; the answer makes it know the newest. What
was not merged stays in the replica's own values, and so is a part of its next message.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from xcloud.base.errors import FrameError, LinkClosed, LinkTimeout
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.averaging import Averager, Merged, ReplicaLinks, Terms, first_part
from xcloud.features.replicas.late import LatePolicy
from xcloud.features.replicas.merging import Contribution
from xcloud.net.frame import Kind, MessageKey, Tensors, TensorSpec
from xcloud.pipeline.exchange import are_finite
from xcloud.record.reporter import Reporter

SERVER = 0
NEWCOMER = -1  # knows no merge
KEPT = 4  # merges that a late replica is told one by one; if it missed more, all values
_ASKS = 0
_ANSWERS = 1  # in the place of the micro-batch
_HEADS = (
    "step, newest merge known, weight of this replica",
    "step of the server, newest merge, whether this replica is in it, whether all values follow",
)
_VALUES = ("values agreed on last", "velocity of the outer optimizer")
_MOST = 2.0**53  # steps and weights are below
PeerState = Literal["present", "late", "left"]
_SPECS = (TensorSpec(shape=(3,), dtype=torch.float64), TensorSpec(shape=(4,), dtype=torch.float64))


class _KeptMerge(NamedTuple):
    """A merge that may still be sent to late replicas.

    before: the step of the merge before.
    parts: the merged change as it was sent.
    """

    step: int
    before: int
    parts: Tensors


@dataclass
class _End(Averager):
    """One end of the averaging: the server, or a member.

    codec: the codec of a replica's contribution.
    merged: the codec of the server's answer.
    known: the step of the newest merge that this replica's values contain.
    """

    links: ReplicaLinks
    codec: TensorCodec
    merged: TensorCodec
    known: int = field(default=0, init=False)

    @property
    def max_bytes(self) -> int:
        """The bytes of its largest frame: values and velocity of the outer optimizer may come
        whole.
        """
        # Values and velocity in FP32, or all the merges that are kept, or a contribution.
        return max(2 * self.codec.raw_bytes, KEPT * self.merged.max_bytes, self.codec.max_bytes)

    # After a restart all replicas are there again, whoever had left before; they do not know what
    # was merged last.
    own_names = ("known",)
    child_names = ("codec", "merged")


@dataclass
class Member(_End):
    """The end of any replica but the averaging server."""

    _reached: int = field(default=0, init=False)  # step of the server when it answered
    _number: int = field(default=0, init=False)  # of its next message
    _has_asked: bool = field(default=False, init=False)  # to have its change merged

    def resume(self, step: int) -> Merged:
        """Take the server's values."""
        self.known = NEWCOMER
        # The links are new (ServerLinks), so numbers of messages begin again at both ends.
        self._number = 0
        self._ask(0, weight=0.0, parts=())
        return self._answer()

    def start(self, step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        """Send this replica's change, unless the server has merged this step already."""
        # A replica that was late has jumped to the server's step: there is nothing left to merge
        # of the steps it skipped.
        if step > self._reached:
            self._has_asked = True
            self._ask(step, weight=weight, parts=self.codec.encode(tensors, is_final=False)[0])

    def finish(self, step: int) -> Merged:
        if not self._has_asked:
            return Merged(is_counted=False, step=step)
        merged = self._answer()
        self.codec.settle(merged.is_counted)  # what does not count is in the values again
        self._has_asked = False
        return merged

    def _ask(self, step: int, weight: float, parts: Tensors) -> None:
        head = torch.tensor([step, self.known, weight], dtype=torch.float64)
        carries = (_HEADS[0], *(self.codec.carries if parts else ()))
        raw = self.codec.raw_bytes if parts else 0
        key = MessageKey(kind=Kind.AVERAGING, step=self._number, micro_batch=_ASKS)
        self.links.post(SERVER, key, parts=(head, *parts), carries=carries, raw_bytes=raw)

    def _answer(self) -> Merged:
        key = MessageKey(kind=Kind.AVERAGING, step=self._number, micro_batch=_ANSWERS)
        self._number += 1
        # The server may have a long round before it: it is waited for as long as it lives.
        parts = self.links.next(SERVER, key, wait_s=math.inf)
        (*numbers, has_values), rest = _read(parts, head=_SPECS[1], sender="the averaging server")
        self._reached, self.known, is_counted = map(int, numbers)
        if has_values:
            return Merged(is_counted=bool(is_counted), step=self._reached, values=rest)
        each = len(self.merged.wire_specs)
        changes = [
            self.merged.decode(rest[first : first + each]) for first in range(0, len(rest), each)
        ]
        return Merged(changes, newest=self.known, is_counted=bool(is_counted), step=self._reached)


@dataclass
class _Peer:
    """A member as the server knows it.

    state: "late" while its merges are made without it; "left" once it is disconnected or has timed
        out.
    number: the number of its next message.
    merged_at: the step at which all that it had done was known here.
    """

    state: PeerState = "present"
    number: int = 0
    merged_at: int = 0


@dataclass
class AveragingServer(_End):
    """The end that merges for all.

    max_weight: a function that returns the largest weight that a replica, by its number, may have
        for its work in these updates.
    late: the policy for a replica that is late or lost.
    values: a function that returns the values of this replica, as OuterParameters.flat, for
        replicas that missed too many merges.
    """

    terms: Terms
    max_weight: Callable[[int, range], float]
    late: LatePolicy
    values: Callable[[], Tensors]
    reporter: Reporter
    _taken: dict[int, Contribution] = field(default_factory=dict, init=False)
    _kept: deque[_KeptMerge] = field(default_factory=lambda: deque(maxlen=KEPT), init=False)
    _is_left_out: bool = field(default=False, init=False)  # the last merge
    _peers: dict[int, _Peer] = field(init=False)
    _due: dict[int, int] = field(default_factory=dict, init=False)  # answers: what each knows

    def __post_init__(self) -> None:
        self._peers = {replica: _Peer() for replica in self.links.others}

    def start(self, step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        self._taken = {SERVER: Contribution(tensors=list(tensors), weight=weight)}

    def finish(self, step: int) -> Merged:
        """Merge what has come from now until `late.wait_s` seconds later at the latest.

        If the result is not finite the merge is skipped, nothing counts in it, and all replicas
        keep what they did.
        """
        for replica, known, contribution in self._come(step, self.late.wait_s, "present"):
            # A change counts only against the values that all have now. One against older values
            # stays in its replica, which adds it to its next one.
            if contribution is not None and known == self.known:
                self._taken[replica] = contribution
            self._due[replica] = known
        changes = []
        merged = self.terms.merge([self._taken[replica] for replica in sorted(self._taken)])
        if are_finite(merged):
            # The server uses what the members decode (`seen`), so that all have the same bits.
            parts, seen = self.merged.encode(merged)
            changes.append(seen)
            self._kept.append(_KeptMerge(step, before=self.known, parts=parts))
            self.known = step
            for replica in self._taken.keys() & self._peers.keys():
                # From here on its next weight is counted.
                self._peers[replica].merged_at = step
        else:
            self._taken = {}
        self._report_merge(step)
        return Merged(changes, newest=step, is_counted=bool(self._taken), step=step)

    def end_step(self, step: int, is_last: bool) -> None:
        """Answer those that are in this step's merge, and those that were absent and have come by
        now.
        After the last step the late ones must know it too.
        """
        # Only now, as the server's own parameters contain the merge: an answer may have to carry
        # all of them (`values`).
        for replica, known in self._due.items():
            self._answer(replica, known, step=step, is_counted=replica in self._taken)
        self._due = {}
        self._taken = {}
        late = self._come(step, self.late.wait_s, "late") if is_last else ()
        # Without waiting: whoever was absent and has come by now is answered, its change stays its
        # own.
        for replica, known, _ in chain(self._come(step, 0.0, "late", "left"), late):
            self._set_state(replica, state="present", step=step)
            self._answer(replica, known, step=step, is_counted=False)

    def resume(self, step: int) -> Merged:
        """Answer the others, which restart with the values of this replica."""
        for peer in self._peers.values():
            peer.merged_at = step
        for replica, known, _ in self._come(step, self.late.wait_s, "present"):
            self._answer(replica, known, step=step, is_counted=False)
        return Merged(is_counted=False, step=step)

    def _come(
        self, step: int, within_s: float, *states: str
    ) -> Iterator[tuple[int, int, Contribution | None]]:
        """Yield the replicas in these states whose next message arrives in time, the newest merge
        that each knows, and its contribution. The others are noted as absent.
        """
        until_s = time.monotonic() + within_s
        for replica in [r for r, peer in self._peers.items() if peer.state in states]:
            if (parts := self._receive(replica, step, until_s - time.monotonic())) is not None:
                yield replica, *self._read(replica, step=step, parts=parts)

    def _receive(self, replica: int, step: int, wait_s: float) -> Tensors | None:
        peer = self._peers[replica]
        key = MessageKey(kind=Kind.AVERAGING, step=peer.number, micro_batch=_ASKS)
        try:
            parts = self.links.next(replica, key, wait_s=max(0.0, wait_s))
        except LinkTimeout:
            why = f"it did not come in {self.late.wait_s:g} s"
            if peer.state == "present":
                state: PeerState = "left" if self.late.may_leave else "late"
                self._set_state(replica, state, step, why=why)
            return None
        except LinkClosed as error:
            peer.number = 0  # what comes next is of a new link
            if peer.state != "left":
                self._lose(replica, step=step, why=str(error), error=error)
            return None
        peer.number += 1
        return parts

    def _read(self, replica: int, step: int, parts: Tensors) -> tuple[int, Contribution | None]:
        peer = self._peers[replica]
        (asked_at, known, weight), rest = _read(parts, head=_SPECS[0], sender=f"replica {replica}")
        if not rest:  # it begins, with the values of here
            peer.merged_at = step
            return int(known), None
        # It cannot have worked in more updates than there were since its last merge.
        most = self.max_weight(replica, range(peer.merged_at + 1, step + 1))
        return int(known), self.terms.contribution(
            int(asked_at), replica, weight, max_weight=most, codec=self.codec, parts=rest
        )

    def _lose(self, replica: int, step: int, why: str, error: LinkTimeout | LinkClosed) -> None:
        if not self.late.may_leave:
            raise type(error)(
                f"{error}. To continue without a lost cloud add +strategy/averaging/late=go_on"
            ) from error
        self._set_state(replica, state="left", step=step, why=why)

    def _set_state(self, replica: int, state: PeerState, step: int, why: str = "") -> None:
        self._peers[replica].state = state
        _, cloud, ranks = self.links.peers[replica]
        what = "back" if state == "present" else state
        word = "gone" if state == "left" else what
        self.reporter.event(
            "absence", now=True, absent=cloud, ranks=[*ranks], what=what, step=step
        )
        self.reporter.note(f"cloud {cloud} is {word} (step {step}){why and f': {why}'}")

    def _report_merge(self, step: int) -> None:
        counted = {replica: contribution.weight for replica, contribution in self._taken.items()}
        weights = {peer.cloud: counted.get(r, 0.0) for r, peer in enumerate(self.links.peers)}
        kind = "merge" if all(weights.values()) else "partial_merge"
        self.reporter.event(kind, step=step, weights=weights)
        was_left_out = self._is_left_out
        self._is_left_out = not any(weights.values())
        if self._is_left_out and not was_left_out:
            self.reporter.note(
                f"the average of step {step} is skipped, and so are later ones until the "
                "changes of the clouds are finite; meanwhile each trains by itself"
            )

    def _answer(self, replica: int, known: int, step: int, is_counted: bool) -> None:
        peer = self._peers[replica]
        # Merges are changes against the one before: they help only if the first of them follows
        # what the replica knows, without a gap.
        missed = [record for record in self._kept if record.step > known]
        is_known = known == self.known or any(record.before == known for record in missed)
        head = torch.tensor([step, self.known, is_counted, not is_known], dtype=torch.float64)
        if is_known:
            parts = tuple(part for record in missed for part in record.parts)
            carries = self.merged.carries * len(missed)
            raw = self.merged.raw_bytes * len(missed)
        else:
            parts = self.values()
            carries = _VALUES
            raw = sum(4 * part.numel() for part in parts)
        key = MessageKey(kind=Kind.AVERAGING, step=peer.number - 1, micro_batch=_ANSWERS)
        try:
            self.links.post(
                replica, key, parts=(head, *parts), carries=(_HEADS[1], *carries), raw_bytes=raw
            )
        except (LinkClosed, LinkTimeout) as error:
            # Its end shows here if it died between its question and this answer.
            self._lose(replica, step=step, why=str(error), error=error)


def _read(parts: Tensors, head: TensorSpec, sender: str) -> tuple[list[float], Tensors]:
    numbers, rest = first_part(parts, spec=head, sender=sender)
    if not bool((numbers.abs() < _MOST).all()):  # nor is NaN
        raise FrameError(f"{sender} sent {numbers.tolist()} for steps, flags or a weight")
    return numbers.tolist(), rest
