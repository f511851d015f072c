"""Predicts the throughput of a one-way job from the times of its parts, and what bounds it. Pure
arithmetic over the same plan that the job runs by; no torch.

Model: a rank computes one thing at a time; a producer's ranks make batch n together (they average
gradients) and send it before they do; batches of one producer share its link to the consumer, in
order; an order takes one latency back; a step of the consumer begins when all its
batches are there, and ends with an all-reduce over its ranks that nothing hides. Not modelled:
jitter, and ranks that slow each other down on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from xcloud.cluster.link_profile import LinkProfile
from xcloud.parallel.one_way.plan import ConsumptionPlan, Feed, Round, Source


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
class FeedPrediction:
    """step_s: of the consumer, at steady state. needs_s: what each part would need for a step if
    nothing else took any time; bound: the part that needs most, or "run-ahead" where the step
    takes longer than that because too little is under way to cover the link's round trip."""

    step_s: float
    batches_per_s: float
    needs_s: dict[str, float]
    bound: str
    consumer_waits_s: float


def simulate_feed(job: SimulatedJob, num_steps: int = 200) -> FeedPrediction:
    """Runs the plan for num_steps; the first half warms up."""
    lanes = [producer.num_ranks for producer in job.producers]
    num_consumers = job.consumer.num_ranks
    feed = Feed(run_ahead=job.run_ahead)
    feed.check(lanes, num_consumers, job.batches_per_step)
    plan = ConsumptionPlan(
        [p.share for p in job.producers], lanes, num_consumers, job.batches_per_step, feed
    )
    everyone, nobody = [num_consumers] * len(lanes), [0] * len(lanes)
    plan.end_step(Round({}, {}, everyone, nobody, nobody))

    latency_s = job.link.latency_s
    line_s = job.link.line_s(job.payload_bytes)
    ordered_at: dict[tuple[Source, int], float] = {}
    free_at = [0.0] * len(lanes)  # of each producer: when its ranks can begin the next number
    line_free_at = [0.0] * len(lanes)
    made = [0] * len(lanes)  # the last number that each producer has made
    arrivals: dict[Source, list[float]] = {source: [] for source in plan.sources}
    used: dict[Source, int] = dict.fromkeys(plan.sources, 0)
    now = waits_s = 0.0
    half_at_s = half_waits_s = 0.0
    for step in range(num_steps):
        for order in plan.orders():
            ordered_at[order.source, order.number] = now + latency_s
        _make(job, plan, ordered_at, free_at, line_free_at, made, arrivals, line_s)
        needed = [s for c in range(num_consumers) for s in plan.step_slots(c)]
        begin = now
        for source in needed:
            begin = max(begin, arrivals[source][used[source]])
            used[source] += 1
        waits_s += begin - now
        consumer = job.consumer
        now = begin + plan.per_consumer * consumer.batch_s + consumer.update_s
        now += consumer.all_reduce_s
        plan.end_step(Round({}, {}, everyone, nobody, nobody))
        if step == num_steps // 2 - 1:
            half_at_s, half_waits_s = now, waits_s
    measured = num_steps - num_steps // 2
    step_s = (now - half_at_s) / measured
    needs_s = _needs_s(job, plan)
    bound = max(needs_s, key=lambda name: needs_s[name])
    if step_s > 1.02 * needs_s[bound]:
        bound = "run-ahead"
    return FeedPrediction(
        step_s, job.batches_per_step / step_s, needs_s, bound, (waits_s - half_waits_s) / measured
    )


def _make(
    job: SimulatedJob,
    plan: ConsumptionPlan,
    ordered_at: dict[tuple[Source, int], float],
    free_at: list[float],
    line_free_at: list[float],
    made: list[int],
    arrivals: dict[Source, list[float]],
    line_s: float,
) -> None:
    """Carry out every number that all ranks of a producer have an order for, and what some ranks
    have one for already: they send before they average."""
    for p, producer in enumerate(job.producers):
        sources = [Source(p, lane) for lane in range(producer.num_ranks)]
        while True:
            number = made[p] + 1
            begun = []
            for source in sources:
                at = ordered_at.get((source, number))
                if at is None:
                    continue
                sent_at = max(at, free_at[p]) + producer.batch_s
                begun.append(sent_at)
                if len(arrivals[source]) < number:
                    line_free_at[p] = max(line_free_at[p], sent_at) + line_s
                    arrivals[source].append(line_free_at[p] + job.link.latency_s)
            if len(begun) < len(sources):
                break
            free_at[p] = max(begun) + producer.all_reduce_s + producer.update_s
            made[p] = number


def _needs_s(job: SimulatedJob, plan: ConsumptionPlan) -> dict[str, float]:
    """Seconds of each part for one step, if it ran alone."""
    consumer, whole = job.consumer, sum(p.share for p in job.producers)
    needs = {
        "consumer": plan.per_consumer * consumer.batch_s
        + consumer.update_s
        + consumer.all_reduce_s
    }
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
    prediction: FeedPrediction
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
        predicted = simulate_feed(scaled)
        first = found[0] if found else None
        speed_up = predicted.batches_per_s / (
            first.prediction.batches_per_s if first else predicted.batches_per_s
        )
        ideal = size / (first.num_ranks if first else size)
        share = scaled.consumer.all_reduce_s / predicted.step_s
        found.append(Scaling(size, predicted, share, speed_up, speed_up / ideal))
    return found
