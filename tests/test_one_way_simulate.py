"""What the simulator of one-way jobs says, against sums that can be done by hand."""

from dataclasses import replace

import pytest

from benchmarks.one_way_prediction import (
    Inside,
    SimulatedCloud,
    SimulatedJob,
    scale_consumer,
    simulate_one_way,
)
from xcloud.net.link_profile import LinkProfile

FREE = LinkProfile(1e12)
JOB = SimulatedJob(
    SimulatedCloud(1, 0.1), [SimulatedCloud(1, 0.05), SimulatedCloud(1, 0.05)], FREE, 1000, 2, 8
)


def test_a_fast_producer_leaves_the_consumer_its_own_pace() -> None:
    found = simulate_one_way(JOB)

    assert found.step_s == pytest.approx(0.2)
    assert found.batches_per_s == pytest.approx(10)
    assert found.bound == "consumer" and found.consumer_waits_s == pytest.approx(0)


def test_a_slow_producer_sets_the_pace_by_its_share() -> None:
    slow = replace(JOB, producers=[SimulatedCloud(1, 0.05), SimulatedCloud(1, 0.3)])
    assert simulate_one_way(slow).step_s == pytest.approx(0.3)
    assert simulate_one_way(slow).bound == "producer 1"

    two_ranks = replace(JOB, producers=[SimulatedCloud(1, 0.05), SimulatedCloud(2, 0.3)])
    assert simulate_one_way(two_ranks).step_s == pytest.approx(0.2, rel=0.02)


def test_a_narrow_link_sets_the_pace_by_its_bytes() -> None:
    narrow = LinkProfile(1e5)
    found = simulate_one_way(replace(JOB, link=narrow, payload_bytes=10_000))

    assert found.step_s == pytest.approx(narrow.line_s(10_000))
    assert found.bound.startswith("link of producer")


def test_latency_costs_nothing_once_run_ahead_covers_it() -> None:
    far = replace(JOB, link=LinkProfile(1e12, 0.5))  # a round trip of five steps

    assert simulate_one_way(far).step_s == pytest.approx(0.2)
    short = simulate_one_way(replace(far, run_ahead=2))
    assert short.bound == "run-ahead"
    # Two steps under way, each comes back after a round trip and the making of its batch.
    assert short.step_s > 0.5


def test_the_all_reduce_of_a_ring() -> None:
    inside = Inside(8e9, 1e-3, ranks_per_machine=2, machine_bits_per_s=8e10)

    assert inside.all_reduce_s(1e9, 4) == pytest.approx(2 * 3 / 4 + 6e-3)
    assert inside.all_reduce_s(1e9, 2) == pytest.approx(0.1 + 2e-3)


def test_scaling_is_bound_by_the_all_reduce_or_by_too_few_producers() -> None:
    inside = Inside(8e9, ranks_per_machine=8, machine_bits_per_s=8e12)
    consumer = SimulatedCloud(8, 1.0, gradient_bytes=4e8, inside=inside)
    job = SimulatedJob(consumer, [SimulatedCloud(64, 0.3)], FREE, 1000, 8, 8)

    eight, sixty_four = scale_consumer(job, [8, 64])
    assert eight.speed_up == 1 and sixty_four.prediction.bound == "consumer"
    assert sixty_four.efficiency == pytest.approx(1 / (1 + 2 * 63 / 64 * 0.4), rel=0.01)

    few = replace(job, producers=[SimulatedCloud(8, 0.3)])
    bound = scale_consumer(few, [8, 64])[1]
    assert bound.prediction.bound == "producer 0"
    assert bound.prediction.batches_per_s == pytest.approx(8 / 0.3, rel=0.01)
