"""Predict the throughput of a one-way job from the times of its parts, and what bounds it: the
orders of the same plan that the job runs by, carried out by the simulator's engine.

Model: a rank computes one thing at a time; a producer's ranks make batch n together (they average
gradients) and send it before they do; batches of one producer share its link to the consumer, in
order; an order takes one latency back; a step of the consumer begins when all its
batches are there, and ends with an all-reduce over its ranks that nothing hides. Not modelled:
jitter, and ranks that slow each other down on one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from xcloud.features.one_way.feed import ConsumptionPlan, Feed
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.simulator.engine import Program, run


@dataclass(frozen=True)
class Inside:
    """The network inside a cloud, for a ring all-reduce of `num_bytes` over n ranks:
    2(n-1)/n * 8 * num_bytes / bandwidth + 2(n-1) * latency.

    A ring is as fast as its slowest hop: up to ranks_per_machine ranks it stays in one machine and
    runs at machine_bits_per_s, with more at bandwidth_bits_per_s.
    """

    bandwidth_bits_per_s: float
    latency_s: float = 0.0
    ranks_per_machine: int = 1
    machine_bits_per_s: float = float("inf")

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        hops = 2 * (num_ranks - 1)
        alone = num_ranks <= self.ranks_per_machine
        rate = self.machine_bits_per_s if alone else self.bandwidth_bits_per_s
        return hops / num_ranks * 8 * num_bytes / rate + hops * self.latency_s


@dataclass(frozen=True)
class SimulatedCloud:
    """batch_s: forward and backward of one batch on one rank. update_s: what else a step (of a
    producer: a batch) takes. gradient_bytes: averaged over the ranks each time; 0 = nothing is."""

    num_ranks: int
    batch_s: float
    update_s: float = 0.0
    gradient_bytes: float = 0.0
    inside: Inside = field(default_factory=lambda: Inside(float("inf")))
    share: float = 1.0  # producers only

    @property
    def all_reduce_s(self) -> float:
        if self.num_ranks == 1 or not self.gradient_bytes:
            return 0.0
        return self.inside.all_reduce_s(self.gradient_bytes, self.num_ranks)


@dataclass(frozen=True)
class SimulatedJob:
    consumer: SimulatedCloud
    producers: Sequence[SimulatedCloud]
    link: LinkProfile
    payload_bytes: int
    batches_per_step: int
    run_ahead: int


@dataclass(frozen=True)
class OneWayPrediction:
    """step_s: of the consumer, at steady state. needs_s: what each part would need for a step if
    nothing else took any time; bound: the part that needs most, or "run-ahead" where the step
    takes longer than that because too little is under way to cover the link's round trip."""

    step_s: float
    batches_per_s: float
    needs_s: dict[str, float]
    bound: str
    consumer_waits_s: float


def simulate_one_way(job: SimulatedJob, num_steps: int = 200) -> OneWayPrediction:
    """Runs the plan for num_steps; the first half warms up."""
    planned = _planned(
        tuple(OneWayCloud(p.num_ranks, p.share) for p in job.producers),
        job.consumer.num_ranks,
        job.batches_per_step,
        job.run_ahead,
        num_steps,
    )
    program, seconds = _program(job, planned)
    sizes = [job.payload_bytes if parcel.receiver == 0 else 0 for parcel in program.parcels]
    begin_s = run(program, seconds, sizes, [job.link] * program.num_routes).begin_s[0]
    work_s = _consumer_s(job)
    # The consumer's operations: [order, work] of every step.
    ended_s = [begin + work_s for begin in begin_s[1::2]]
    waits_s = [begin - order for order, begin in zip(begin_s[0::2], begin_s[1::2], strict=True)]
    half = num_steps // 2
    measured = num_steps - half
    step_s = (ended_s[-1] - (ended_s[half - 1] if half else 0.0)) / measured
    needs_s = _needs_s(job)
    bound = max(needs_s, key=lambda name: needs_s[name])
    if step_s > 1.02 * needs_s[bound]:
        bound = "run-ahead"
    return OneWayPrediction(
        step_s, job.batches_per_step / step_s, needs_s, bound, sum(waits_s[half:]) / measured
    )


class _Planned(NamedTuple):
    """ordered: the batches (source, number) that are ordered when a step begins, by step. used_in:
    the step that consumes a batch; batches of later steps are missing."""

    ordered: list[list[tuple[int, int]]]
    used_in: dict[tuple[int, int], int]


@lru_cache(maxsize=64)
def _planned(
    producers: tuple[OneWayCloud, ...],
    num_consumers: int,
    batches_per_step: int,
    run_ahead: int,
    num_steps: int,
) -> _Planned:
    """What the plan says while nobody is slow or lost; it does not depend on times then."""
    clouds = {"consumer": OneWayCloud(num_consumers)} | {
        f"producer {p}": cloud for p, cloud in enumerate(producers)
    }
    layout = OneWayLayout(clouds, "free")
    feed = Feed(run_ahead=run_ahead).fitted(layout, batches_per_step)
    plan = ConsumptionPlan(layout, batches_per_step, feed)
    steady = plan.round()
    steady.ready[:] = num_consumers
    plan.end_step(steady)
    ordered = []
    used: Counter[int] = Counter()
    used_in = {}
    for step in range(num_steps):
        ordered.append([(order.source, order.number) for order in plan.orders()])
        for source in (s for c in range(num_consumers) for s in plan.step_slots(c)):
            used[source] += 1
            used_in[source, used[source]] = step
        plan.end_step(steady)
    return _Planned(ordered, used_in)


def _program(job: SimulatedJob, planned: _Planned) -> tuple[Program, list[list[float]]]:
    """Rank 0 is the consumer, whose ranks work as one; behind it stand the producers' ranks.
    Route 0 carries the orders, route 1 + p what producer p sends."""
    producer_of = [p for p, cloud in enumerate(job.producers) for _ in range(cloud.num_ranks)]
    program = Program.for_ranks(1 + len(producer_of))
    seconds: list[list[float]] = [[] for _ in range(1 + len(producer_of))]
    program.route()
    routes = [program.route() for _ in job.producers]
    needed = Counter(planned.used_in.values())
    inputs = [program.token(needed[step]) for step in range(len(planned.ordered))]
    nowhere = program.token()
    met: dict[tuple[int, int], int] = {}  # all ranks of a producer have made this number
    for step, orders in enumerate(planned.ordered):
        told = program.token()
        program.operation(0, posts=(program.parcel(0, 1, 0, told),))
        program.operation(0, inputs[step])
        seconds[0] += [0.0, _consumer_s(job)]
        for source, number in orders:
            rank, p = 1 + source, producer_of[source]
            producer = job.producers[p]
            used_in = planned.used_in.get((source, number))
            token = nowhere if used_in is None else inputs[used_in]
            batch = program.parcel(rank, 0, routes[p], token)
            program.operation(rank, told, (batch,))
            round_ = p, number
            if round_ not in met:
                met[round_] = program.token(producer.num_ranks)
            program.operation(rank, signal=met[round_])
            program.operation(rank, met[round_])
            seconds[rank] += [producer.batch_s, 0.0, producer.all_reduce_s + producer.update_s]
    return program, seconds


def _consumer_s(job: SimulatedJob) -> float:
    """Seconds of a step of the consumer once all its batches are there."""
    consumer = job.consumer
    per_rank = job.batches_per_step // consumer.num_ranks
    return per_rank * consumer.batch_s + consumer.update_s + consumer.all_reduce_s


def _needs_s(job: SimulatedJob) -> dict[str, float]:
    """Seconds of each part for one step, if it ran alone."""
    whole = sum(p.share for p in job.producers)
    needs = {"consumer": _consumer_s(job)}
    line_s = job.link.line_s(job.payload_bytes)
    for index, producer in enumerate(job.producers):
        batches = job.batches_per_step * producer.share / whole
        each_s = producer.batch_s + producer.update_s + producer.all_reduce_s
        needs[f"producer {index}"] = batches / producer.num_ranks * each_s
        needs[f"link of producer {index}"] = batches * line_s
    return needs


@dataclass(frozen=True)
class Scaling:
    """One size of the consumer: speed-up over the first size, and the share of the ideal."""

    num_ranks: int
    prediction: OneWayPrediction
    all_reduce_share: float
    speed_up: float
    efficiency: float


def scale_consumer(job: SimulatedJob, sizes: Sequence[int]) -> list[Scaling]:
    """The same batches for every rank of the consumer, with more ranks; producers stay as they
    are. The first size is the reference."""
    per_rank = job.batches_per_step // job.consumer.num_ranks
    found: list[Scaling] = []
    for size in sizes:
        fewest = min(p.num_ranks for p in job.producers)
        batches = per_rank * size
        scaled = replace(
            job,
            consumer=replace(job.consumer, num_ranks=size),
            batches_per_step=batches,
            run_ahead=max(job.run_ahead, 2 * -(-batches // fewest) + 1),
        )
        predicted = simulate_one_way(scaled)
        first = found[0] if found else None
        speed_up = predicted.batches_per_s / (
            first.prediction.batches_per_s if first else predicted.batches_per_s
        )
        ideal = size / (first.num_ranks if first else size)
        share = scaled.consumer.all_reduce_s / predicted.step_s
        found.append(Scaling(size, predicted, share, speed_up, speed_up / ideal))
    return found
