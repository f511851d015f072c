"""Merging where a cloud may be late, leave and come back. Replica 0, the hub, must stay: it merges
what has come in time and answers each replica for itself, so that nobody waits for a third one.

Every message of a replica says which merge it knows last; the answer makes it know the newest.
What was not merged stays in the replica's own values, and so is a part of its next message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from xcloud.base.errors import FrameError, LinkClosed, LinkTimeout
from xcloud.cluster.frame import Kind, MessageKey, TensorSpec
from xcloud.cluster.link import Parts
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.averaging import Watch, contribution_of
from xcloud.parallel.merging import Contribution, Merge, can_merge
from xcloud.parallel.norm import are_finite
from xcloud.parallel.outer_parameters import OuterParameters
from xcloud.parallel.replica_links import ReplicaLinks

HUB = 0
NEWCOMER = -1  # knows no merge
HUB_WAIT_S = 3600.0  # of a replica that comes first: the hub may have a long round before it
KEPT = 4  # merges that a late replica is told one by one; if it missed more, all values
_ASKS, _ANSWERS = 0, 1  # in the place of the micro-batch
_HEADS = (
    "step, newest merge known, weight of this replica",
    "step of the hub, newest merge, whether this replica is in it, whether all values follow",
)
_VALUES = ("values agreed on last", "velocity of the outer optimizer")
_SPECS = (TensorSpec((3,), torch.float64), TensorSpec((4,), torch.float64))


class Told(NamedTuple):
    """A merge: at which step, the step of the one before, how much each replica counted (0: left
    out), and the merged change as it was sent: nothing where the merge was left out."""

    step: int
    before: int
    weights: tuple[float, ...]
    parts: Parts

    @property
    def is_partial(self) -> bool:
        return not all(self.weights)


class Absence(NamedTuple):
    """`late`: left out until it comes; `left`: its link has ended, or it was waited for in vain;
    `back`: either of them is there again."""

    replica: int
    what: Literal["late", "left", "back"]
    step: int
    why: str = ""


@dataclass
class Ends:
    """What hub and members have alike. codec: of what a replica sends; merged: of what the hub
    answers. Both are decoded by whoever did not encode them."""

    values: OuterParameters
    codec: TensorCodec
    merged: TensorCodec
    links: ReplicaLinks

    def __post_init__(self) -> None:
        for codec in (self.codec, self.merged):
            codec.of_replica(self.links.replica)


@dataclass
class Member:
    """Any replica but the hub. known: the step of the newest merge that its values contain."""

    ends: Ends
    known: int = 0
    _number: int = 0  # of its next message

    def join(self) -> int:
        """Of one that begins in a job that goes on: take the hub's values. Returns the step at
        which the hub is."""
        self.known, self._number = NEWCOMER, 0
        hub_step, _ = self._ask(0, 0.0, ())
        self.ends.values.take()
        return hub_step

    def merge(self, step: int, weight: float) -> tuple[int, bool]:
        """Returns the step at which the hub is, and whether this replica's change was merged."""
        ends = self.ends
        gradient, before = ends.values.gradient(), ends.codec.residuals
        parts, _ = ends.codec.encode(gradient)
        hub_step, is_taken = self._ask(step, weight, parts)
        if is_taken:
            ends.values.take()
        else:
            ends.values.keep(gradient)
            ends.codec.undo(before)  # it is in the values again
        return hub_step, is_taken

    def _ask(self, step: int, weight: float, parts: Parts) -> tuple[int, bool]:
        ends = self.ends
        head = torch.tensor([step, self.known, weight], dtype=torch.float64)
        carries = (_HEADS[0], *(ends.codec.carries if parts else ()))
        raw = ends.codec.raw_bytes if parts else 0
        key = MessageKey(Kind.AVERAGING, self._number, _ASKS)
        ends.links.send(HUB, key, (head, *parts), carries, raw)
        key = key._replace(micro_batch=_ANSWERS)
        self._number += 1
        head, *rest = _checked(ends.links.recv(HUB, key, None, HUB_WAIT_S), _SPECS[1], "the hub")
        if not bool(head.isfinite().all()):
            raise FrameError(f"the hub sent {head.tolist()} for steps and flags")
        hub_step, self.known, is_taken, has_values = map(int, head.tolist())
        if has_values:
            if len(rest) != 2:
                raise FrameError(f"the hub sent {len(rest)} tensors for values and velocity")
            for own, told in zip((ends.values.anchor, ends.values.velocity), rest, strict=True):
                _fill(own, told)
        else:
            each = len(ends.merged.wire_specs)
            for first in range(0, len(rest), each):
                merged = ends.merged.decode(tuple(rest[first : first + each]))
                ends.values.move(merged)
        return hub_step, bool(is_taken)


@dataclass
class _Peer:
    """state: what is expected of it next. number: of its next message. merged_at: the step at
    which all that it had done was known here."""

    state: Literal["present", "late", "left"] = "present"
    number: int = 0
    merged_at: int = 0


class _Asked(NamedTuple):
    known: int
    contribution: Contribution | None


@dataclass
class Hub:
    """late: whether a replica that has not come after wait_s is left out of this merge alone, or
    counts as one that has left. leave: whether the others go on then. watch: see averaging.Watch;
    names: of the tensors, for it. most_weight: that a replica can have for what it did in so many
    steps."""

    ends: Ends
    merge_rule: Merge
    late: Literal["wait", "skip"]
    leave: Literal["fail", "go_on"]
    wait_s: float
    on_merge: Callable[[Told], None] = lambda told: None
    on_absence: Callable[[Absence], None] = lambda absence: None
    watch: Watch | None = None
    names: Sequence[str] = ()
    most_weight: Callable[[int], float] = float
    known: int = 0
    _kept: deque[Told] = field(default_factory=lambda: deque(maxlen=KEPT))
    _peers: dict[int, _Peer] = field(init=False)

    def __post_init__(self) -> None:
        others = range(self.ends.links.num_replicas)
        self._peers = {replica: _Peer() for replica in others if replica != HUB}

    def merge(self, step: int, weight: float) -> bool:
        """Of what has come from now until wait_s later at the latest. Returns False for a merge
        that is left out: too few have come to outvote a bad one, or the result is not finite. All
        replicas keep what they did then."""
        deadline_s = time.monotonic() + self.wait_s
        found = {HUB: Contribution(self.ends.values.gradient(), weight)}
        asked: dict[int, _Asked] = {}
        for replica in self._in("present"):
            message = self._receive(replica, step, deadline_s - time.monotonic())
            if message is not None:
                asked[replica] = message
                if message.contribution is not None and message.known == self.known:
                    found[replica] = message.contribution
        parts: Parts = ()
        num_counted = sum(contribution.weight > 0 for contribution in found.values())
        if can_merge(self.merge_rule, num_counted) and are_finite(
            merged := self.merge_rule([found[replica] for replica in sorted(found)])
        ):
            parts, seen = self.ends.merged.encode(merged)
            self.ends.values.move(seen)
            self.ends.values.take()
            for replica in found.keys() & self._peers.keys():
                self._peers[replica].merged_at = step
        else:
            found = {}
        weights = tuple(
            found[replica].weight if replica in found else 0.0
            for replica in range(self.ends.links.num_replicas)
        )
        told = Told(step, self.known, weights, parts)
        self._kept.append(told)
        self.known = step
        self.on_merge(told)
        for replica, message in asked.items():
            self._answer(replica, message.known, step, replica in found)
        return bool(found)

    def answer_absent(self, step: int) -> None:
        """Take back those that have come by now. Call it after a merge at this step."""
        for replica in self._in("late", "left"):
            self._take_back(replica, step, 0.0)

    def welcome(self, step: int) -> None:
        """Of a run that goes on: the others begin again, with the values of here."""
        deadline_s = time.monotonic() + self.wait_s
        for replica in self._in("present"):
            message = self._receive(replica, step, deadline_s - time.monotonic())
            if message is not None:
                self._answer(replica, message.known, step, False)

    def end(self, step: int) -> None:
        """After the last merge: late ones must know it too."""
        deadline_s = time.monotonic() + self.wait_s
        for replica in self._in("late"):
            self._take_back(replica, step, deadline_s - time.monotonic())

    def _in(self, *states: str) -> list[int]:
        return [replica for replica, peer in self._peers.items() if peer.state in states]

    def _take_back(self, replica: int, step: int, wait_s: float) -> None:
        message = self._receive(replica, step, wait_s)
        if message is not None:
            self._peers[replica].state = "present"
            self.on_absence(Absence(replica, "back", step))
            self._answer(replica, message.known, step, False)

    def _receive(self, replica: int, step: int, wait_s: float) -> _Asked | None:
        """Its next message; None if it is not there, and then it is noted as absent."""
        peer, links = self._peers[replica], self.ends.links
        key = MessageKey(Kind.AVERAGING, peer.number, _ASKS)
        try:
            parts = links.recv(replica, key, None, max(0.0, wait_s))
        except LinkTimeout as error:
            if peer.state == "present":
                why = f"it did not come in {self.wait_s:g} s"
                if self.late == "skip":
                    peer.state = "late"
                    self.on_absence(Absence(replica, "late", step, why))
                else:
                    self._lose(replica, step, why, error)
            return None
        except LinkClosed as error:
            peer.number = 0  # what comes next is of a new link
            if peer.state != "left":
                self._lose(replica, step, str(error), error)
            return None
        peer.number += 1
        head, *rest = _checked(parts, _SPECS[0], f"replica {replica}")
        if not bool(head.isfinite().all()):
            raise FrameError(f"replica {replica} sent {head.tolist()} for steps and a weight")
        asked_at, known, weight = head.tolist()
        contribution = None
        if rest:
            most = self.most_weight(step - peer.merged_at)
            contribution = contribution_of(replica, weight, most, self.ends.codec, rest)
            if self.watch is not None:
                named = zip(self.names, contribution.tensors, strict=True)
                self.watch(int(asked_at), replica, dict(named))
        else:  # it begins, with the values of here
            peer.merged_at = step
        return _Asked(int(known), contribution)

    def _lose(self, replica: int, step: int, why: str, error: LinkTimeout | LinkClosed) -> None:
        if self.leave == "fail":
            raise type(error)(
                f"{error}. To go on without a cloud that leaves set strategy.averaging.leave=go_on"
            ) from error
        self._peers[replica].state = "left"
        self.on_absence(Absence(replica, "left", step, why))

    def _answer(self, replica: int, known: int, step: int, is_taken: bool) -> None:
        ends, peer = self.ends, self._peers[replica]
        missed = [told for told in self._kept if told.step > known]
        is_known = known == self.known or any(told.before == known for told in missed)
        head = torch.tensor([step, self.known, is_taken, not is_known], dtype=torch.float64)
        if is_known:
            parts = tuple(part for told in missed for part in told.parts)
            num_merged = sum(bool(told.parts) for told in missed)
            carries, raw = ends.merged.carries * num_merged, ends.merged.raw_bytes * num_merged
        else:
            parts = (_flat(ends.values.anchor), _flat(ends.values.velocity))
            carries, raw = _VALUES, sum(4 * part.numel() for part in parts)
        key = MessageKey(Kind.AVERAGING, peer.number - 1, _ANSWERS)
        try:
            ends.links.send(replica, key, (head, *parts), (_HEADS[1], *carries), raw)
        except (LinkClosed, LinkTimeout) as error:
            self._lose(replica, step, str(error), error)


def _checked(parts: Parts, head: TensorSpec, sender: str) -> Parts:
    if not parts or TensorSpec.of(parts[0]) != head:
        raise FrameError(
            f"a message of {sender} begins with {[TensorSpec.of(p) for p in parts[:1]]}, expected "
            f"{head}; do all clouds run the same experiment file?"
        )
    return parts


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    if flat.shape != (sum(sizes),):
        raise FrameError(f"the hub sent {tuple(flat.shape)} values, expected {sum(sizes)}")
    for tensor, piece in zip(tensors, torch.split(flat, sizes), strict=True):
        tensor.copy_(piece.view_as(tensor))
