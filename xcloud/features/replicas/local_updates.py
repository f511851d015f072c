"""Local updates: each replica trains alone for a number of steps, then their changes are merged.
Local SGD, FedAvg, DiLoCo, Streaming DiLoCo; also where a cloud may be late, leave and come back
(averaging_server.py).

Moments of the inner optimizer stay where they are and are never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, Rate, settings
from xcloud.comm.state import MEMORY, State, StatefulTree, StateTree, whole_number
from xcloud.features.replicas.averaging import Averager, Merged, Terms
from xcloud.features.replicas.averaging_server import SERVER, AveragingServer, Member
from xcloud.features.replicas.late import LatePolicy, Wait
from xcloud.features.replicas.merging import Robust, by_tensor, contiguous, weighted_mean
from xcloud.features.replicas.outer_optimizer import OuterOptimizer, OuterParameters
from xcloud.features.replicas.replicas import Replicas, Shapes
from xcloud.features.replicas.round_budget import RoundBudget
from xcloud.job.strategy import Averaging, Traits
from xcloud.layout import ClusterLayout
from xcloud.pipeline.exchange import Exchange, FlatBuffer, Work, are_finite

NAME = "strategy.averaging"
_NOTHING = 1e-12  # a weight that counts only where all have this one
_UNDER_WAY = f"{MEMORY}.under_way"


@settings(NAME)
class LocalUpdates(Averaging):
    """The strategy that merges the changes of replicas every so many steps
    (docs/strategies.md).

    Steps are counted alike in all replicas: a merge stands at a step's number.

    every: the number of steps between two merges of the same parameters (H).
    outer: the optimizer that applies the merged change.
    weigh: the weight of a replica: the samples or tokens it trained on since the last merge, or
        the same for all.
    fragments: the number of parts in which parameters are merged, one after the other, every /
        fragments steps apart (Streaming DiLoCo, arXiv:2501.18512).
    overlap: the number of steps that a replica trains on while its change is merged (tau there).
    mix: the share of its own values that a replica keeps at a merge (alpha there).
    max_s, max_tokens: the seconds, or tokens trained on, after which a replica makes no more steps
        before the next merge.
    merge: a Byzantine-robust aggregator (merging.py), made by every replica from the changes of
        all; null = the weighted mean.
    feedback: the error of a lossy compressor is added to the next change; a number below 1: this
        share of it, so that old errors fade (SparseLoCo: 0.95).
    late: the policy where a cloud is late or lost: wait, skip or go_on (late.py). With skip and
        go_on the first cloud merges for all, so no merge is robust, each replica is in one cloud,
        and merges are of all parameters at once.
    """

    every: Positive = 50
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    weigh: Literal["samples", "tokens", "equal"] = "samples"
    fragments: Positive = 1
    overlap: NotNegative = 0
    mix: Annotated[float, Field(ge=0, le=0.999999)] = 0.0
    max_s: Annotated[float, Field(gt=0)] | None = None
    max_tokens: Positive | None = None
    feedback: bool | Rate = True
    merge: Robust | None = None
    late: LatePolicy = field(default_factory=Wait)

    def __post_init__(self) -> None:
        if self.fragments > self.every or self.overlap >= self.every:
            raise ConfigError(
                f"{NAME}.fragments must be at most {NAME}.every ({self.every}), and "
                f"{NAME}.overlap less than it; got fragments={self.fragments}, overlap="
                f"{self.overlap}. One fragment is merged at a step, and ends before its next merge"
            )
        is_plain = self.is_at_once and self.merge is None and type(self.outer) is OuterOptimizer
        if self.late.is_elastic and not is_plain:
            raise ConfigError(
                f"strategy/averaging/late={self.late.word}: the first cloud merges for all, all "
                "parameters at once and by the mean, since a robust merge must not be any one "
                "cloud's word, and tells a cloud that was away of no round, as another outer "
                f"optimizer may ask; set {NAME}.fragments=1, {NAME}.overlap=0, {NAME}.mix=0, "
                f"{NAME}.merge=null and leave {NAME}.outer._target_ out, or choose late=wait"
            )

    @property
    def label(self) -> str:
        parts = {
            f"every {self.every}": True,
            self.outer.label: True,
            f"{self.fragments} fragments": self.fragments > 1,
            f"overlap {self.overlap}": self.overlap,
            f"mix {self.mix:g}": self.mix,
            f"feedback {self.feedback:g}": 0 < self.feedback < 1,
            repr(self.merge): self.merge is not None,
            self.late.label: self.late.label,
        }
        return ", ".join(part for part, is_said in parts.items() if is_said)

    @property
    def is_at_once(self) -> bool:
        """True if a merge is of all parameters, which are equal in all replicas after it."""
        return self.fragments == 1 and not self.overlap and not self.mix

    @property
    def traits(self) -> Traits:
        column = "elastic" if self.late.is_elastic else "local updates"
        return Traits(
            trains_locally=True,
            is_elastic=self.late.is_elastic,
            may_leave=self.late.may_leave,
            restart_s=self.late.restart_s,
            every=self.every,
            equal_every=self.every if self.is_at_once else 0,
            column=column if self.is_at_once else "streaming",
            per_step=self.fragments / self.every,
            fragments=self.fragments,
            hidden_steps=self.overlap,
            num_copies=2,
        )

    @property
    def max_under_way(self) -> int:
        """The number of fragments that are under way at once."""
        return max(1, -(-self.overlap * self.fragments // self.every))

    def offset(self, number: int) -> int:
        """Return at which remainder of step / every this fragment is merged.

        They are evenly spread, the last one at 0.
        """
        return (number + 1) * self.every // self.fragments % self.every

    def check(self, layout: ClusterLayout) -> None:
        """Raise ConfigError for clouds that these settings do not fit. Some need replicas of one
        cloud each, whose ranks hold all stages."""
        super().check(layout)
        needs = {
            f"late={self.late.word}": self.late.is_elastic,
            "max_s": self.max_s is not None,
            "max_tokens": self.max_tokens is not None,
            "weigh=tokens": self.weigh == "tokens",
        }
        asked = ", ".join(f"{NAME}.{name}" for name, is_set in needs.items() if is_set)
        for name, cloud in layout.clouds.items() if asked else ():
            is_whole = len(cloud.stages or ()) == layout.num_stages
            if not is_whole or cloud.one_stage_per_rank:
                raise ConfigError(
                    f"{asked}: each rank must hold the full model, but those of cloud {name!r} "
                    "hold parts; set strategy.replicas=null and one_stage_per_rank=false"
                )

    def join(self, replicas: Replicas) -> Exchange:
        return LocalRounds(averaging=self, replicas=replicas)

    def weight_of(self, work: float) -> float:
        """Return the weight of so much work in a merge."""
        return float(work > 0) if self.weigh == "equal" else work


@dataclass
class _Fragment(StatefulTree):
    """A run of parameters that are merged together.

    work: the work of this replica since it last sent.
    under_way: the step at which it last sent, 0 for none.
    sent: the work that it reported then.
    max_work, max_sent: the most that each replica can have done, by replica, for `work` and
        `sent`.
    """

    values: OuterParameters
    averager: Averager = field(init=False)
    offset: int
    max_work: list[float]
    max_sent: list[float]
    work: float = 0.0
    under_way: int = 0
    sent: float = 0.0

    own_names = (MEMORY, "work", "max_work", "max_sent")
    child_names = ("values", "averager")

    def own(self) -> State:
        numbers = {"work": self.work}
        for replica in range(len(self.max_work)):
            numbers[f"max_work.{replica}"] = self.max_work[replica]
            numbers[f"max_sent.{replica}"] = self.max_sent[replica]
        state: State = {name: torch.tensor(n, dtype=torch.float64) for name, n in numbers.items()}
        return {_UNDER_WAY: self.under_way, **state}

    def take(self, own: State) -> None:
        self.under_way = whole_number(own, name=_UNDER_WAY)
        self.work = float(own["work"])
        replicas = range(len(self.max_work))
        self.max_work = [float(own[f"max_work.{replica}"]) for replica in replicas]
        self.max_sent = [float(own[f"max_sent.{replica}"]) for replica in replicas]


class LocalRounds(Exchange):
    """The exchange of one rank whose replica trains alone between merges.

    Gradients are summed inside the replica. The run ends with a merge of everything, of which
    nothing own is kept, so that all replicas have the same values. Where that cuts a
    fragment's round short, its momentum is left out (OuterParameters.move).

    Where merges are elastic, the first rank of each cloud carries all of its values across. A
    replica that was late skips the steps up to the server's.

    The plain case, of one fragment and without overlap, is `after_update`, `start_round`, `_apply`
    and `_move`: the lines at the head of outer_optimizer.py.
    """

    def __init__(self, averaging: LocalUpdates, replicas: Replicas) -> None:
        self._settings = averaging
        self._replicas = replicas
        self.budget = RoundBudget(
            averaging.every, averaging.max_s, averaging.max_tokens, replicas.group
        )
        names = list(replicas.trained)
        sizes = [p.numel() for p in replicas.trained.values()]
        if 0 < len(names) < averaging.fragments:
            raise ConfigError(
                f"{NAME}.fragments is {averaging.fragments}, but a rank of this job trains "
                f"{len(names)} tensors; set it to at most {len(names)}"
            )
        # A rank of frozen stages trains nothing, and has no fragment.
        runs = contiguous(sizes, count=averaging.fragments) if names else []
        self.fragments = [
            self._fragment([names[position] for position in run], number)
            for number, run in enumerate(runs)
        ]
        averagers = [fragment.averager for fragment in self.fragments]
        if not averaging.late.is_elastic:
            # Before the first round replicas must be equal: a merge is of changes, and would hide
            # it.
            replicas.open(averagers, averaging.late.wait_s, averaging.max_under_way)
            self.compare(0)
        # The other ranks of a cloud have no link: they get values from their leader (`_apply`).
        elif replicas.group.leads:
            replicas.open(averagers)

    def before_update(
        self, step: int, buffers: Mapping[int, FlatBuffer], losses: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        group = self._replicas.group
        return {stage: b.sum_over(group, loss=losses[stage]) for stage, b in buffers.items()}

    def after_update(self, step: int, work: Work) -> None:
        averaging = self._settings
        is_last = step == self._replicas.last_step
        done = float(work.num_samples) if averaging.weigh == "samples" else work.weight
        for fragment in self.fragments:
            if not self.is_idle(step):
                fragment.work += done
            # Bounds go by the files of this cloud: what another says of its work is held against
            # them.
            for replica in range(len(fragment.max_work)):
                fragment.max_work[replica] += self._max_work(replica, step)
        under_way = [fragment for fragment in self.fragments if fragment.under_way]
        for fragment in sorted(under_way, key=lambda fragment: fragment.under_way):  # as sent
            if step - fragment.under_way >= averaging.overlap or is_last:
                self._apply(fragment, averaging.mix)
        for fragment in self.fragments:
            # The order of merges, within a step and from step to step, is the same in all
            # replicas.
            if is_last or (step % averaging.every == fragment.offset):
                self.start_round(fragment, step)
                # One after the other: links have room for those of `overlap`, not for all.
                if is_last or not averaging.overlap:
                    self._apply(fragment, mix=0.0 if is_last else averaging.mix)
        for fragment in self.fragments:
            fragment.averager.end_step(step, is_last=is_last)
        self.budget.end_step(step, num_tokens=work.weight)
        if is_last:
            self.compare(step)

    def start_round(self, fragment: _Fragment, step: int) -> None:
        """Send what a fragment has changed since its last round."""
        fragment.sent = fragment.work
        fragment.work = 0.0
        fragment.max_sent = fragment.max_work
        fragment.max_work = [0.0] * len(fragment.max_sent)
        weight = self._settings.weight_of(fragment.sent)
        if not self._settings.late.is_elastic:  # where no replica has done anything, their mean
            weight = max(weight, _NOTHING)
        # Those of other shares, too: ranks of a cloud must decide alike.
        if not are_finite(p.detach() for p in fragment.values.parameters):
            fragment.values.take()
            fragment.sent = weight = 0.0
            self._replicas.reporter.note(
                f"parameters were not finite at the merge of step {step}: this replica goes back "
                "to the values of the merge before and counts for nothing in this one"
            )
        fragment.averager.start(step, fragment.values.gradient(), weight)
        fragment.under_way = step

    def _apply(self, fragment: _Fragment, mix: float) -> None:
        """Apply the merge that is under way to the parameters, in all ranks of the cloud."""
        merged = fragment.averager.finish(fragment.under_way)
        if self._settings.late.is_elastic:
            self._apply_of_server(fragment, merged)
        else:
            self._move(fragment, merged)
            fragment.values.take(mix)
        fragment.under_way = 0

    def _move(self, fragment: _Fragment, merged: Merged) -> None:
        """Make the outer optimizer's step for each merge; there are several only where this
        cloud was away."""
        every = self._settings.every
        last_step = self._replicas.last_step
        # Fragments that are not merged at multiples of `every` have their first merge before one.
        since_first = merged.newest - fragment.offset
        round_number = -(-since_first // every) + bool(fragment.offset)
        ends_within = merged.newest == last_step and last_step % every != fragment.offset
        have_moved = []
        for number, change in enumerate(merged.changes, start=1):
            is_cut_short = ends_within and number == len(merged.changes)
            have_moved.append(fragment.values.move(change, round_number, is_cut_short))
        fragment.averager.settle(was_used=all(have_moved))

    def _apply_of_server(self, fragment: _Fragment, merged: Merged) -> int:
        """Apply what the averaging server merged. Return the step that it has reached."""
        is_new = bool(merged.changes or merged.values)
        numbers = torch.tensor([merged.step, merged.is_counted, is_new])
        step, is_counted, is_new = self._replicas.group.from_leader(numbers).tolist()
        # Measured against the outer parameters of now, before they move below.
        own = [] if is_counted else fragment.values.gradient()
        if merged.values:
            fragment.values.replace(merged.values)
        self._move(fragment, merged)
        # After the last merge nothing can count any more: replicas end equal.
        if is_counted or step >= self._replicas.last_step:
            fragment.values.take()
        else:
            # What was not merged stays in this replica's values, and its work weighs in the next
            # merge.
            fragment.work += fragment.sent
            if is_new:
                fragment.values.keep(own)
        # A replica that was late goes on at the server's step: it skips those up to it.
        self.budget.idle_until = max(self.budget.idle_until, step)
        return int(step)

    def is_idle(self, step: int) -> bool:
        return step <= self.budget.idle_until

    def compare(self, step: int) -> None:
        if not self._settings.late.is_elastic:
            self._replicas.compare(step, self._replicas.group)

    def resume(self, step: int) -> int:
        (fragment,) = self.fragments
        fragment.under_way = 0
        return self._apply_of_server(fragment, fragment.averager.resume(step))

    def children(self) -> StateTree:
        fragments = {str(number): fragment for number, fragment in enumerate(self.fragments)}
        return {"budget": self.budget, **fragments}

    def _fragment(self, names: list[str], number: int) -> _Fragment:
        replicas = self._replicas
        averaging = self._settings
        parameters = {name: replicas.trained[name] for name in names}
        shapes = {name: p.shape for name, p in parameters.items()}
        # Where merges are elastic the first rank of each cloud carries all of its values.
        num_shares = replicas.links.num_shares if not averaging.late.is_elastic else 1
        shares = by_tensor(shapes, num_shares)
        values = OuterParameters(parameters, shares, replicas.group, averaging.outer)
        num = replicas.links.num_replicas
        fragment = _Fragment(values, averaging.offset(number), [0.0] * num, [0.0] * num)
        terms = Terms(
            merge=averaging.merge or weighted_mean,
            channel=number,
            # Where no replica has done anything, all count.
            max_weight=lambda r: max(averaging.weight_of(fragment.max_sent[r]), _NOTHING),
        )
        averager = Averager()
        if averaging.late.is_elastic and replicas.group.leads:
            averager = self._elastic_averager(shapes, values, terms)
        elif replicas.group.group_rank < num_shares:
            own = {piece.name: piece.shape for piece in shares[replicas.group.group_rank]}
            feedback = averaging.feedback
            averager = replicas.averager(
                own, terms, feedback, "local updates", number, num_fragments=averaging.fragments
            )
        fragment.averager = averager
        return fragment

    def _elastic_averager(self, shapes: Shapes, values: OuterParameters, terms: Terms) -> Averager:
        replicas = self._replicas
        averaging = self._settings
        change, merged = (
            replicas.codec(shapes, feedback=averaging.feedback, stream=("local updates", name))
            for name in ("change", "merged")
        )
        if replicas.links.replica != SERVER:
            return Member(links=replicas.links, codec=change, merged=merged)
        return AveragingServer(
            links=replicas.links,
            codec=change,
            merged=merged,
            terms=replicas.guarded(terms, names=shapes),
            max_weight=lambda replica, steps: averaging.weight_of(
                sum(self._max_work(replica, step) for step in steps)
            ),
            late=averaging.late,
            values=values.flat,
            reporter=replicas.reporter,
        )

    def _max_work(self, replica: int, step: int) -> float:
        """Return what a replica does in an update that it does not leave out."""
        if self._settings.weigh == "tokens":
            return self._replicas.weight(replica, step)
        return float(self._replicas.num_samples[replica])
