"""What a plan costs: step time, bubble, bytes, memory, and a quick estimate of its step.

A replica is simulated (prediction.py); one whose ranks hold the whole model is a pipeline of one
stage. What replicas average is a formula (formulas.py). Where the profile names a line inside a
cloud, ranks of a stage sum their gradients over it in a ring.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise, product

from xcloud.base.errors import ConfigError
from xcloud.layout import ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.schedule import Schedule, split_backwards
from xcloud.simulator.costs import BoundaryCodec, Costs, Direction, Profile, Update, lines_of
from xcloud.simulator.formulas import ExchangeCost, PieceWork, exchange_of, memory_of, work_before
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan, Priced
from xcloud.simulator.prediction import Prediction, Simulator, largest_first


@dataclass(eq=False)
class Pricer:
    """The prices of plans for one job, from its profile.

    arranged: the arrangement of each strategy, by name.
    batch_size: the number of samples of an update.
    passes: the number of accumulation passes of an update.
    bandwidth: the bits per second of every line between clouds, in place of its own; for
        crossings.
    steps: the number of simulated steps. From 2 on the last one is measured in steady state.
    crossing: the share of the samples that cross each boundary, by the stage before it. All
        samples cross a boundary that is not named.
    """

    profile: Profile
    arranged: Mapping[str, Arranged]
    batch_size: int
    passes: int = 1
    bandwidth: float | None = None
    steps: int = 2
    crossing: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        profile = self.profile
        self._replicas = {name: found.replicas for name, found in self.arranged.items()}
        # The program of a step knows no costs, so plans that differ in cuts or compression share
        # one.
        self._simulators: dict[object, Simulator] = {}
        self._before = lru_cache(maxsize=256)(partial(work_before, profile))
        self._work = lru_cache(maxsize=65536)(self._work_of)
        self.directions_at = lru_cache(maxsize=4096)(self._directions_at)
        self._lines = {
            name: lines_of(found.layout, given=profile.lines, bandwidth=self.bandwidth)
            for name, found in self.arranged.items()
        }
        # Of replicas that do not differ the first stands for all: none has more micro-batches.
        self._alike = {
            name: alike(layouts, lines=self._lines[name])
            for name, layouts in self._replicas.items()
        }
        self._stages = {
            name: {n: _stages(self._replicas[name][n], lines=self._lines[name]) for n in firsts}
            for name, firsts in self._alike.items()
        }
        self._exchange_of = lru_cache(maxsize=None)(self._new_exchange)

    def at_bandwidth(self, bandwidth: float) -> Pricer:
        """Return a pricer of the same jobs over lines of this bandwidth, in bits per second."""
        other = replace(self, bandwidth=bandwidth)
        other._simulators = self._simulators  # they know no costs
        return other

    def samples(self, plan: Plan) -> float:
        return self.batch_size / (self.passes * plan.micro_batches)

    def line(self, strategy: str, here: str, there: str) -> LinkProfile:
        return self._lines[strategy][f"{here}-{there}"]

    def bandwidths(self, strategy: str) -> list[float]:
        """Return the bandwidths of the lines between clouds, in bits per second, each once."""
        found = {line.bandwidth_bits_per_s for line in self._lines[strategy].values()}
        return sorted(bits_per_s for bits_per_s in found if bits_per_s)

    # Prices.

    def step_s(self, plan: Plan) -> float:
        own_s = max(self.predict(plan, n).step_s for n in self._alike[plan.strategy])
        return self._exchange(plan).step_s(own_s)

    def price(self, plan: Plan) -> Priced:
        """Return everything about a plan; its step_s is the same as that of `step_s`."""
        exchange = self._exchange(plan)
        replicas = self._replicas[plan.strategy]
        parts: list[tuple[Prediction, ClusterLayout]] = []
        by_count: dict[tuple[int, int], Prediction] = {}
        for first, numbers in self._alike[plan.strategy].items():
            for number in numbers:
                # Replicas that are alike and have as many micro-batches take equally long, so one
                # is simulated.
                key = first, plan.micro_batches_of(number, num_replicas=len(replicas))
                by_count[key] = by_count.get(key) or self.predict(plan, number)
                parts.append((by_count[key], replicas[number]))
        slowest = max((part for part, _ in parts), key=lambda part: part.step_s)
        step_s = exchange.step_s(slowest.step_s)
        codec_s = exchange.per_step * exchange.codec_s
        waits_s = step_s - slowest.step_s - codec_s
        # The exchange comes behind the slowest replica's step. What later steps hide of it costs
        # nothing.
        spent = slowest.critical_s | {
            "codec of averaging": codec_s,
            f"averaging over link {exchange.where}": waits_s,
        }
        uses = [use for part, _ in parts for use in part.ranks]
        compute_s = sum(use.compute_s for use in uses)
        idle_s = sum(use.idle_s for use in uses)  # as in a run, without the waits of averaging
        num_bytes = defaultdict[str, float](float, exchange.bytes_per_step)
        for part, layout in parts:
            named = dict(zip(part.step.layout.clouds, layout.clouds, strict=True))
            for line in part.links:
                num_bytes[f"{named[line.here]}-{named[line.there]}"] += line.num_bytes
        bubble_ratio = idle_s / compute_s if compute_s else 0.0
        memory = self.memory(plan)
        spent = largest_first(spent)
        return Priced(
            plan,
            step_s,
            bubble_ratio,
            bytes_between=num_bytes,
            memory=memory,
            spent_s=spent,
            compute_s=compute_s,
        )

    def estimate_s(self, plan: Plan) -> float:
        """Return about what a step takes, whatever the schedule, to choose what to simulate.

        The busiest stage or line is taken to work all the time, and one micro-batch to go through
        all others.
        """
        b = self.samples(plan)
        longest_s = 0.0
        call_s = self.profile.stage_forward_s.at(b) + self.profile.stage_backward_s.at(b)
        num_replicas = len(self._replicas[plan.strategy])
        for first, stages in self._stages[plan.strategy].items():
            m = self.passes * plan.micro_batches_of(first, num_replicas)
            through_s = busiest_s = 0.0
            out = back = Direction()
            for (start, end), (slowdown, num_ranks, ways) in zip(plan.spans, stages, strict=True):
                work = self._work(start, end, b)
                own_s = slowdown * (work.forward_s + work.backward_s + call_s)
                # `out` and `back` are still those of the boundary before this stage.
                own_s += out.decompress_s + back.compress_s
                out = back = Direction()
                if ways:
                    up, down = ways
                    out, back = self.directions_at(plan.compression, end, b)
                    busy = up.line_s(out.num_bytes), down.line_s(back.num_bytes)
                    through_s += sum(busy) + up.beyond_s + down.beyond_s
                    # The first micro-batch is counted in `through_s` already.
                    busiest_s = max(busiest_s, m * max(busy) - sum(busy))
                own_s += out.compress_s + back.decompress_s
                # One micro-batch passes every stage and line; the others wait behind the busiest
                # of these.
                through_s += own_s
                busiest_s = max(busiest_s, (math.ceil(m / num_ranks) - 1) * own_s)
            longest_s = max(longest_s, through_s + busiest_s)
        return self._exchange(plan).step_s(longest_s)

    # One replica.

    def silent_boundaries(self, plan: Plan) -> frozenset[int]:
        """Return the boundaries over which no gradient returns: the stages before them."""
        ends = enumerate(plan.ends[:-1])
        return frozenset(
            stage for stage, end in ends if self._codec(plan.compression, end=end).backward is None
        )

    def predict(self, plan: Plan, replica: int = 0) -> Prediction:
        """Return a replica's simulated step, by itself."""
        replicas = self._replicas[plan.strategy]
        layout = replicas[replica]
        silent = self.silent_boundaries(plan)
        num_lanes = self.arranged[plan.strategy].layout.num_lanes
        schedule = plan.schedule_in(replica, num_replicas=len(replicas), num_lanes=num_lanes)
        key = repr(layout.clouds), schedule, silent  # strategies may share pipelines
        if key not in self._simulators:
            self._simulators[key] = Simulator(
                schedule=schedule,
                layout=layout,
                agrees=True,
                num_passes=self.passes,
                num_steps=self.steps,
                without_gradient=silent,
                without_rows={stage for stage, share in self.crossing.items() if not share},
            )
        return self._simulators[key].run(self._costs(plan, layout, schedule=schedule))

    def _costs(self, plan: Plan, layout: ClusterLayout, schedule: Schedule) -> Costs:
        b = self.samples(plan)
        num_stages = len(plan.ends)
        call_forward_s = self.profile.stage_forward_s.at(b)
        call_backward_s = self.profile.stage_backward_s.at(b)
        (forward, backward) = self._boundaries(plan, layout)
        forward_s = []
        backward_s = []
        weights_s = []
        updates = []
        for stage, span in enumerate(plan.spans):
            # A stage is called once for a micro-batch, whatever its pieces.
            work = self._work(*span, b)
            forward_s.append((call_forward_s + work.forward_s) * self.crossing.get(stage, 1.0))
            own_s = call_backward_s + work.backward_s
            # A split backward calls the layers' products apart, which costs or saves some time.
            if _splits(schedule, stage=stage, num_stages=num_stages):
                own_s = max(0.0, own_s + work.splitting_s)
            backward_s.append(own_s)
            weights_s.append(min(own_s, work.weights_s))  # differences of long sums
            first = layout.ranks_of(stage)[0]
            num_ranks = len(layout.ranks_of(stage))
            fetch_s = self.profile.fetch_s.at(b) * schedule.num_micro_batches / num_ranks
            fetch_s /= len(layout.placement(first).stages)  # once for all that a rank holds
            average_s = self._ring_s(
                layout.stage_cloud(stage), num_ranks, num_bytes=work.trained_bytes
            )
            updates.append(Update(fetch_s, average_s, optimizer_s=work.optimizer_s))
        slowdown = {
            rank: cloud.slowdown
            for name, cloud in layout.clouds.items()
            if cloud.slowdown != 1
            for rank in layout.ranks_in(name)
        }
        return Costs(
            forward_s,
            backward_s,
            forward,
            backward=backward,
            updates=updates,
            slowdown=slowdown,
            lines=self._lines[plan.strategy],
            control_bytes=self.profile.control_bytes,
            weights_s=weights_s,
        )

    def _ring_s(self, cloud: str, num_ranks: int, num_bytes: float) -> float:
        """Return the seconds of a sum over ranks of one cloud.

        It is n - 1 messages of 1/n around, and as many to tell it.
        """
        inside = self.profile.lines.get(f"{cloud}-{cloud}")
        if inside is None:
            return 0.0
        return 2 * (num_ranks - 1) * inside.transfer_s(math.ceil(num_bytes / num_ranks))

    def _exchange(self, plan: Plan) -> ExchangeCost:
        return self._exchange_of(plan.strategy, plan.ends, plan.compression)

    def _new_exchange(
        self, strategy: str, ends: tuple[int, ...], compression: str
    ) -> ExchangeCost:
        costs = self.profile.compressors[compression].averaging
        arranged = self.arranged[strategy]
        averaging = arranged.strategy.averaging
        if averaging is None or arranged.layout.num_replicas == 1:
            return ExchangeCost()
        if costs is None:
            raise ConfigError(
                f"the profile says nothing of what {compression} costs when replicas "
                "average; measure it, or leave strategies out of plan.search"
            )
        profile = self.profile
        lines = self._lines[strategy]
        whole = max(1, profile.trained_bytes)
        trains_locally = averaging.traits.trains_locally
        spans = pairwise((0, *ends))
        # What replicas average is what is trained, whatever lies beside it in a stage.
        shares = [self._work(*span, 1.0).trained_bytes / whole for span in spans]
        around_s = profile.around_changes_s if trains_locally else profile.around_gradients_s
        return exchange_of(
            arranged.layout, averaging, costs, shares, lines=lines, around_s=around_s
        )

    # What crosses.

    def _boundaries(
        self, plan: Plan, layout: ClusterLayout
    ) -> tuple[list[Direction], list[Direction]]:
        """Return the costs of all boundaries, forward and backward."""
        b = self.samples(plan)
        forward = list[Direction]()
        backward = list[Direction]()
        for stage, end in enumerate(plan.ends[:-1]):
            here = layout.stage_cloud(stage)
            there = layout.stage_cloud(stage + 1)
            out = back = Direction()
            if here != there:
                out, back = self.directions_at(plan.compression, end, b)
                # Rows that are kept behind the boundary do not cross again.
                out = out.times(self.crossing.get(stage, 1.0))
            elif f"{here}-{here}" in self.profile.lines:  # as it is, without a codec
                ways = self.directions_at(NO_COMPRESSION, end, b)
                out, back = (Direction(way.num_bytes) for way in ways)
            forward.append(out)
            backward.append(back)
        return forward, backward

    def _directions_at(self, compression: str, end: int, b: float) -> tuple[Direction, Direction]:
        codec = self._codec(compression, end=end)
        back = Direction() if codec.backward is None else codec.backward.at(b)
        return codec.forward.at(b), back

    def _codec(self, compression: str, end: int) -> BoundaryCodec:
        boundary = self.profile.pieces[end - 1].boundary
        assert boundary is not None, f"no cut behind piece {end - 1}"
        return self.profile.compressors[compression].boundaries[boundary]

    def memory(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of the fullest rank, by cloud."""
        b = self.samples(plan)
        arranged = self.arranged[plan.strategy]
        works = [self._work(*span, b) for span in plan.spans]
        silent = self.silent_boundaries(plan)
        messages = dict[int, tuple[int, int | None]]()
        for stage, end in enumerate(plan.ends[:-1]):
            if arranged.layout.ranks_of(stage) == arranged.layout.ranks_of(stage + 1):
                continue  # handed over inside a rank
            leaves = arranged.layout.leaves_cloud(stage)
            # Queues hold what is sent, which is compressed only where it leaves a cloud.
            out, back = self.directions_at(plan.compression if leaves else NO_COMPRESSION, end, b)
            returned = round(back.num_bytes) if stage not in silent else None
            messages[stage] = round(out.num_bytes), returned
        counted = memory_of(plan, arranged, works, messages, num_passes=self.passes)
        return {cloud: found + self.profile.other_bytes for cloud, found in counted.items()}

    def _work_of(self, start: int, end: int, b: float) -> PieceWork:
        before = self._before(b)
        return PieceWork(*map(operator.sub, before[end], before[start]))


@lru_cache(maxsize=4096)
def _splits(schedule: Schedule, stage: int, num_stages: int) -> bool:
    return bool(split_backwards(schedule.actions(stage, num_stages)))


def _stages(
    layout: ClusterLayout, lines: Mapping[str, LinkProfile]
) -> list[tuple[float, int, list[LinkProfile]]]:
    """Return each stage's slowdown and ranks, and between clouds the lines to the next stage and
    back."""
    clouds = [layout.stage_cloud(stage) for stage in range(layout.num_stages)]
    return [
        (
            layout.clouds[here].slowdown,
            len(layout.ranks_of(stage)),
            [lines[f"{here}-{there}"], lines[f"{there}-{here}"]] if here != there else [],
        )
        for stage, (here, there) in enumerate(pairwise([*clouds, clouds[-1]]))
    ]


def alike(
    replicas: Sequence[ClusterLayout], lines: Mapping[str, LinkProfile]
) -> dict[int, list[int]]:
    """Return the numbers of replicas, by the first of those like them.

    Replicas are alike that have as many ranks and stages, compute as fast, and use the same lines.
    """
    firsts = dict[object, int]()
    numbers_of = dict[int, list[int]]()
    for number, layout in enumerate(replicas):
        wires = tuple(lines.get(f"{a}-{b}") for a, b in product(layout.clouds, repeat=2))
        first = firsts.setdefault((repr(tuple(layout.clouds.values())), repr(wires)), number)
        numbers_of.setdefault(first, []).append(number)
    return numbers_of


@dataclass(frozen=True)
class OverEpochs:
    """The seconds of a step in the first epoch, in later ones, and on average over the run, where
    samples that have crossed once need not cross again.

    kept_share: the share of the samples that do not, at the boundary where fewest are kept.
    first_epoch_share: the first epoch's share of the run's steps.
    at_the_end: the prices of the run's last step.
    """

    first_epoch_s: float
    later_epochs_s: float
    kept_share: float
    first_epoch_share: float
    at_the_end: Pricer

    @property
    def mean_s(self) -> float:
        first = self.first_epoch_share
        return first * self.first_epoch_s + (1 - first) * self.later_epochs_s

    def as_table(self) -> dict[str, float]:
        own = {name: value for name, value in vars(self).items() if name != "at_the_end"}
        return {**own, "mean_s": self.mean_s}
